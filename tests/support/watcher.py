"""A reader of the stats protocol in its plainest form: one blocking SUB socket."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import zmq

from corellm.comms.run_folder import RunFolder
from corellm.comms.stats_messages import SNAPSHOTS, Snapshot, Tree, open_frame


class Watcher:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket

    def next(self) -> Snapshot | Tree:
        assert self.socket.poll(30_000), "30 s have passed without a message"
        return open_frame(self.socket.recv())

    def until(self, condition: Callable[[Snapshot], bool], what: str) -> list[Snapshot]:
        """The snapshots up to the first for which the condition holds."""
        found: list[Snapshot] = []
        deadline = time.monotonic() + 60
        while not found or not condition(found[-1]):
            assert time.monotonic() < deadline, f"60 s have passed without {what}"
            message = self.next()
            if isinstance(message, Snapshot):
                found.append(message)
        return found


@contextlib.contextmanager
def watching(folder: RunFolder, *topics: bytes) -> Iterator[Watcher]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.SUB)
    for topic in topics or (SNAPSHOTS,):
        socket.setsockopt(zmq.SUBSCRIBE, topic)
    socket.connect(folder.watch)
    try:
        yield Watcher(socket)
    finally:
        socket.close(linger=0)
        context.term()
