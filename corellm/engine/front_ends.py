"""The engine's side of its front ends: who is connected, what they asked for, what is to be sent to them."""

from __future__ import annotations

from collections.abc import Iterator

import zmq

from corellm.comms import sockets
from corellm.comms.codec import Decoder, encode
from corellm.comms.messages import (
    PROTOCOL_VERSION,
    ClientMessage,
    Dying,
    EngineMessage,
    Goodbye,
    Hello,
    Ping,
)
from corellm.comms.run_folder import RunFolder
from corellm.comms.silence import Silence
from corellm.errors import ProtocolError

MESSAGES_A_TURN = 256  # so that busy front ends do not keep the loop from the workers
SILENCE_S = 20.0  # a front end pings every few seconds; one that is silent for longer is gone


class FrontEnds:
    """Any number of front ends behind one ROUTER socket. A front end is known by its connection's identity."""

    def __init__(self, folder: RunFolder) -> None:
        self._socket = sockets.router(zmq.Context.instance(), folder.requests)
        self._messages: Decoder[ClientMessage] = Decoder(ClientMessage)
        self._silences: dict[bytes, Silence] = {}

    def watch(self, poller: zmq.Poller) -> None:
        poller.register(self._socket, zmq.POLLIN)

    def receive(self) -> Iterator[tuple[bytes, ClientMessage]]:
        """What came in, up to a bound. `Goodbye` is also what a front end says that broke the protocol."""
        for _ in range(MESSAGES_A_TURN):
            if not self._socket.poll(0):
                return
            client, *frames = self._socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise ProtocolError(f"a message has one frame; {len(frames)} came")
                message = self._messages.decode(frames[0])
                if isinstance(message, Hello):
                    self._greet(client, message)
                elif client not in self._silences:
                    raise ProtocolError("this connection was dropped or never opened; connect again")
            except ProtocolError as error:
                self.refuse(client, error.message)
                message = Goodbye()
            if isinstance(message, Goodbye):
                self._silences.pop(client, None)
            else:
                self._silences.setdefault(client, Silence()).heard()
            if not isinstance(message, Ping):
                yield client, message

    def refuse(self, client: bytes, reason: str) -> None:
        """Answer a message that breaks the protocol; the connection is dropped."""
        self.send(client, Dying(code=ProtocolError.code, message=reason))
        self._silences.pop(client, None)

    def _greet(self, client: bytes, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"{hello.front_end} speaks protocol {hello.version}, this engine {PROTOCOL_VERSION}; "
                "use the same CoreLLM version for both"
            )

    def send(self, client: bytes, message: EngineMessage) -> bool:
        """Send, or drop a front end that is gone or does not read: False."""
        try:
            self._socket.send_multipart([client, encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._silences.pop(client, None)
            return False
        return True

    def broadcast(self, message: EngineMessage) -> None:
        for client in list(self._silences):
            self.send(client, message)

    def silent(self) -> list[bytes]:
        """Forget the front ends that have not been heard for too long, and name them."""
        gone = [client for client, silence in self._silences.items() if silence.seconds() > SILENCE_S]
        for client in gone:
            del self._silences[client]
        return gone

    def close(self) -> None:
        self._socket.close()
