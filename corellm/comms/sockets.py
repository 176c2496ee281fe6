"""ZMQ sockets with every limit finite: queued messages, message size, time to linger."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import zmq
import zmq.asyncio

QUEUE = 16384  # messages held for a peer that does not read
MAX_MESSAGE = 256 << 20  # bytes; a step of the longest context is far below
LINGER_MS = 1000
WATCH_QUEUE = 8  # snapshots held for a dashboard; together they may be a few megabytes


def configure(socket: zmq.Socket[Any], *, queue: int = QUEUE) -> None:
    """Set the limits that every CoreLLM socket has."""
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, queue)
    socket.setsockopt(zmq.RCVHWM, queue)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)


def router(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """The engine's socket for front ends. A send to a peer that is gone or does not read raises instead of dropping."""
    socket = context.socket(zmq.ROUTER)
    configure(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(address)
    return socket


def publisher(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """The engine's stats. Slow readers lose messages; the engine never waits for them."""
    socket = context.socket(zmq.PUB)
    configure(socket, queue=64)
    socket.bind(address)
    return socket


def watch_publisher(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """What the engine publishes for dashboards. It learns which topics anyone reads; slow readers lose messages."""
    socket = context.socket(zmq.XPUB)
    configure(socket, queue=WATCH_QUEUE)
    socket.bind(address)
    return socket


def pair(context: zmq.Context[zmq.Socket[bytes]], address: str, *, bind: bool) -> zmq.Socket[bytes]:
    """One end of the line between the engine (which binds) and a worker."""
    socket = context.socket(zmq.PAIR)
    configure(socket)
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


def pull(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """The engine's socket for the heartbeats of all workers."""
    socket = context.socket(zmq.PULL)
    configure(socket)
    socket.bind(address)
    return socket


def push(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A worker's socket for its heartbeats, used by one thread alone."""
    socket = context.socket(zmq.PUSH)
    configure(socket, queue=16)
    socket.connect(address)
    return socket


def dealer(context: zmq.asyncio.Context, address: str) -> zmq.asyncio.Socket:
    """A front end's socket to the engine."""
    socket = context.socket(zmq.DEALER)
    configure(socket)
    socket.connect(address)
    return socket


def watcher(context: zmq.asyncio.Context, address: str, topics: Iterable[bytes]) -> zmq.asyncio.Socket:
    """A dashboard's socket. What it does not read in time is lost, whole snapshots at a time."""
    socket = context.socket(zmq.SUB)
    configure(socket, queue=WATCH_QUEUE)
    for topic in topics:
        socket.setsockopt(zmq.SUBSCRIBE, topic)
    socket.connect(address)
    return socket


def subscriber(context: zmq.asyncio.Context, address: str) -> zmq.asyncio.Socket:
    """A reader of the engine's stats; old snapshots give way to new ones."""
    socket = context.socket(zmq.SUB)
    configure(socket, queue=64)
    socket.setsockopt(zmq.CONFLATE, 1)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(address)
    return socket
