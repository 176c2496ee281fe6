"""Messages to bytes and back. msgpack of typed structs; arrays are raw bytes; nothing is ever unpickled."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from corellm.comms.messages import F32, I32, I64
from corellm.errors import ProtocolError

M = TypeVar("M")
_DTYPES: dict[type, np.dtype[Any]] = {I32: np.dtype("<i4"), I64: np.dtype("<i8"), F32: np.dtype("<f4")}


def i32(values: Any) -> I32:
    """An int32 array as messages carry it."""
    return np.ascontiguousarray(values, dtype="<i4").view(I32)


def i64(values: Any) -> I64:
    """An int64 array as messages carry it."""
    return np.ascontiguousarray(values, dtype="<i8").view(I64)


def f32(values: Any) -> F32:
    """A float32 array as messages carry it."""
    return np.ascontiguousarray(values, dtype="<f4").view(F32)


def _to_wire(value: Any) -> Any:
    kind = _DTYPES.get(type(value))
    if kind is None or value.dtype != kind or value.ndim != 1:
        raise ProtocolError(f"a {type(value).__name__} cannot travel in a message; wrap arrays with i32, i64 or f32")
    return value.data.cast("B") if value.size else b""


def _from_wire(kind: type, value: Any) -> Any:
    dtype = _DTYPES[kind]
    if not isinstance(value, bytes) or len(value) % dtype.itemsize:
        raise msgspec.ValidationError(f"an array of {dtype.name} is damaged")
    return np.frombuffer(value, dtype=dtype).view(kind)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)


def encode(message: Any) -> bytes:
    """One message as one frame."""
    return _encoder.encode(message)


class Decoder(Generic[M]):
    """Decodes the messages of one union.

    Raises `ProtocolError` on an unknown tag or a field of the wrong type.
    """

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union, dec_hook=_from_wire)

    def decode(self, frame: bytes | memoryview) -> M:
        try:
            return self._decoder.decode(frame)  # type: ignore[no-any-return]
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ProtocolError(f"undecodable message: {error}") from None
