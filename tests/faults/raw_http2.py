"""HTTP/2 by hand: calls of a shard server made of single frames, so that they can be half, slow or many."""

from __future__ import annotations

import contextlib
import socket

from persist_lib.format import wire
from persist_lib.runtime.threads import Resource

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _literal(name: str, value: str) -> bytes:
    """A header that is in no table, as RFC 7541 (6.2.2) writes it."""
    assert len(name) < 127
    assert len(value) < 127
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def headers(call: str, **more: str) -> bytes:
    told = {
        ":method": "POST", ":scheme": "http", ":path": f"/{wire.SERVICE}/{call}", ":authority": "here",
        "content-type": "application/grpc", "te": "trailers", **more,
    }  # fmt: skip
    return b"".join(_literal(name, value) for name, value in told.items())


class Connection(Resource):
    """One connection. Nothing is sent that is not said."""

    def __init__(self, port: int, *, begins: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.settimeout(60)
        self._read = b""
        try:
            if begins:
                self.send(PREFACE + frame(SETTINGS))
        except OSError:  # the server has closed it already
            self.socket.close()
            raise

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def call(self, name: str, message: bytes, stream: int = 1) -> None:
        prefixed = b"\x00" + len(message).to_bytes(4, "big") + message
        self.send(frame(HEADERS, headers(name), END_HEADERS, stream) + frame(DATA, prefixed, END_STREAM, stream))

    def frame(self) -> tuple[int, bytes] | None:
        """The kind and the payload of the next frame; None at the end."""
        if (head := self._exactly(9)) is None or (payload := self._exactly(int.from_bytes(head[:3], "big"))) is None:
            return None
        return head[3], payload

    def answer(self) -> bytes:
        """The message of the next answer."""
        data = b""
        while (found := self.frame()) is not None:
            kind, payload = found
            if kind == DATA:
                data += payload
                if len(data) >= 5 and len(data) >= 5 + int.from_bytes(data[1:5], "big"):
                    return data[5:]
        raise EOFError("the connection ended without an answer")

    def is_ended(self) -> bool:
        """Wait until the other side ends the connection."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()

    def _exactly(self, count: int) -> bytes | None:
        while len(self._read) < count:
            if not (more := self.socket.recv(1 << 16)):
                return None
            self._read += more
        found, self._read = self._read[:count], self._read[count:]
        return found
