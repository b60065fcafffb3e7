"""Messages between the suite and its worker: length-prefixed msgpack over pipes, arrays as raw bytes.

Both ends are ours and nothing else is ever decoded; there is no pickle. A message is a map of str to plain data; arrays
travel as `Array`. Buffers that either side reads without a copy live in shared memory instead (`arena`).
"""

from __future__ import annotations

import struct
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

Message = dict[str, Any]
_LENGTH = struct.Struct("<Q")
MAX_MESSAGE_BYTES = 1 << 31
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def send(stream: IO[bytes], message: Message) -> None:
    """Write one message and flush it."""
    body = _encode(message)
    stream.write(_LENGTH.pack(len(body)))
    stream.write(body)
    stream.flush()


def receive(stream: IO[bytes]) -> Message | None:
    """Read one message; None at the end of the stream.

    Raises:
        ValueError: a cut or impossible message, as when something else writes into the pipe.
    """
    head = stream.read(_LENGTH.size)
    if not head:
        return None
    length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else MAX_MESSAGE_BYTES + 1
    if length > MAX_MESSAGE_BYTES:
        raise ValueError("the worker's pipe holds no message; something in the target writes into it")
    body = stream.read(length)
    if len(body) != length:
        raise ValueError("the worker's last message is cut; it ended while writing")
    return _decode(body)


def pack(array: npt.NDArray[Any]) -> dict[str, Any]:
    """An array as plain data."""
    return {"dtype": array.dtype.str, "shape": list(array.shape), "bytes": array.tobytes()}


def unpack(packed: dict[str, Any]) -> npt.NDArray[Any]:
    """The array that `pack` packed; writable.

    Raises:
        ValueError: bytes that do not fill the shape.
    """
    flat: npt.NDArray[Any] = np.frombuffer(packed["bytes"], dtype=np.dtype(packed["dtype"]))
    shaped: npt.NDArray[Any] = flat.reshape(packed["shape"]).copy()
    return shaped
