"""A pooler of PostgreSQL connections in transaction mode, as harsh as one may be: what holds here holds on pgbouncer.

Each transaction of a client goes to a server connection chosen at random, never twice in a row to the same one. Those
connections carry settings that somebody else left behind. Startup parameters that pgbouncer refuses are refused, no
server's word on whether it is a standby is passed on, and a client that leaves in mid-transaction costs its connection.

    with Pooler(port) as pooler:
        ...                       # use 127.0.0.1:pooler.port, any user that the server trusts
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading

from tests.loopback import Loopback, hang_up, without_delay

CHUNK = 1 << 16
SSL, GSS, CANCEL = 80877103, 80877104, 80877102
SPOILT = (
    "SET search_path = nowhere; SET synchronous_commit = off; SET lock_timeout = '1h'; SET DateStyle = 'SQL, DMY'; "
    "SET TimeZone = 'Asia/Kolkata'; SET IntervalStyle = 'iso_8601'; SET extra_float_digits = 0;"
    "SET bytea_output = 'escape'"
)
"""What another program did with the connection before."""
ALLOWED = {"user", "database", "client_encoding", "application_name", "datestyle", "timezone", "replication"}
UNTOLD = {b"in_hot_standby", b"default_transaction_read_only", b"search_path"}


class Gone(Exception):
    """The other side has closed its connection."""


class _Line:
    """A connection that is read message by message."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._data = bytearray()
        without_delay(end)

    def exactly(self, size: int) -> bytes:
        while len(self._data) < size:
            self.fill()
        found, self._data = bytes(self._data[:size]), self._data[size:]
        return found

    def fill(self) -> None:
        if not (data := self.end.recv(CHUNK)):
            raise Gone
        self._data += data

    def messages(self) -> list[tuple[bytes, bytes]]:
        """Kinds and whole messages of what has come."""
        found = []
        at = 0
        while len(self._data) - at >= 5:
            (size,) = struct.unpack_from(">I", self._data, at + 1)
            if len(self._data) - at < size + 1:
                break
            found.append((bytes(self._data[at : at + 1]), bytes(self._data[at : at + size + 1])))
            at += size + 1
        del self._data[:at]
        return found

    def message(self) -> tuple[bytes, bytes]:
        head = self.exactly(5)
        (size,) = struct.unpack(">I", head[1:])
        return head[:1], head + self.exactly(size - 4)

    def close(self) -> None:
        hang_up([self.end])


class _Server(_Line):
    """A connection of the pool, logged in and spoilt."""

    def __init__(self, port: int, user: bytes, database: bytes) -> None:
        super().__init__(socket.create_connection(("127.0.0.1", port)))
        words = b"user\0" + user + b"\0database\0" + database + b"\0client_encoding\0UTF8\0\0"
        self.end.sendall(struct.pack(">II", len(words) + 8, 196608) + words)
        self.told = self._until_ready()
        query = SPOILT.encode() + b"\0"
        self.end.sendall(b"Q" + struct.pack(">I", len(query) + 4) + query)
        self._until_ready()

    def _until_ready(self) -> dict[bytes, bytes]:
        """What the server tells of its settings on the way."""
        told = {}
        while True:
            kind, message = self.message()
            assert kind != b"E", message
            if kind == b"S":
                name, value = message[5:-1].split(b"\0")
                told[name] = value
            if kind == b"Z":
                return told


class Pooler(Loopback):
    """Forwards a port of its own to `target`, through at most `most` connections. Counts `transactions`, and those that
    `moved`: went to another server connection than the one before them of the same client."""

    def __init__(self, target: int, most: int = 6, seed: int = 0) -> None:
        self.target = target
        self.transactions = self.moved = 0
        self.named: list[bytes] = []
        """Prepared statements with a name, which the next transaction would not find."""
        self._most = most
        self._random = random.Random(seed)
        self._free: dict[tuple[bytes, bytes], list[_Server]] = {}
        self._made = 0
        self._gate = threading.Condition()
        self._lines: list[_Line] = []
        super().__init__()

    def connected(self, client: socket.socket) -> None:
        line = _Line(client)
        self._lines.append(line)
        with contextlib.suppress(OSError, Gone):
            who = self._greet(line)
            if who is not None:
                self._forward(line, who)
        line.close()

    def _greet(self, client: _Line) -> tuple[bytes, bytes] | None:
        while True:
            size, code = struct.unpack(">II", client.exactly(8))
            if code not in (SSL, GSS):
                break
            client.end.sendall(b"N")
        if code == CANCEL:
            return None
        words = client.exactly(size - 8).rstrip(b"\0").split(b"\0")
        given = dict(zip(words[::2], words[1::2], strict=True))
        if unknown := {name.decode().lower() for name in given} - ALLOWED:
            self._refuse(client, f"unsupported startup parameter: {sorted(unknown)}")
            return None
        who = given[b"user"], given.get(b"database", given[b"user"])
        told = self._take(who, None)
        self._give(who, told)
        tell = b"R" + struct.pack(">II", 8, 0) + b"K" + struct.pack(">III", 12, 1, 1)
        for name, value in told.told.items():
            if name not in UNTOLD:
                text = name + b"\0" + value + b"\0"
                tell += b"S" + struct.pack(">I", len(text) + 4) + text
        client.end.sendall(tell + b"Z" + struct.pack(">I", 5) + b"I")
        return who

    def _refuse(self, client: _Line, why: str) -> None:
        text = b"SFATAL\0VFATAL\0C08P01\0M" + why.encode() + b"\0\0"
        client.end.sendall(b"E" + struct.pack(">I", len(text) + 4) + text)

    def _take(self, who: tuple[bytes, bytes], last: _Server | None) -> _Server:
        """Any of those that are free, but not `last` if there may be another."""
        with self._gate:
            while True:
                free = self._free.setdefault(who, [])
                others = [server for server in free if server is not last]
                if others:
                    chosen = self._random.choice(others)
                    free.remove(chosen)
                    return chosen
                if self._made < self._most:
                    self._made += 1
                    break
                if free:
                    return free.pop()
                self._gate.wait()
        server = _Server(self.target, *who)
        self._lines.append(server)
        return server

    def _give(self, who: tuple[bytes, bytes], server: _Server | None) -> None:
        with self._gate:
            if server is None:
                self._made -= 1
            else:
                self._free[who].append(server)
            self._gate.notify()

    def _forward(self, client: _Line, who: tuple[bytes, bytes]) -> None:
        last: _Server | None = None
        while True:
            first = client.message()
            if first[0] == b"X":
                return
            server = self._take(who, last)
            self.transactions += 1
            self.moved += last is not None and server is not last
            try:
                ended = self._transaction(client, server, [first, *client.messages()])
            except (OSError, Gone):
                server.close()
                self._give(who, None)
                raise
            self._give(who, server)
            if ended:
                return
            last = server

    def _transaction(self, client: _Line, server: _Server, coming: list[tuple[bytes, bytes]]) -> bool:
        """Until the server is ready and outside of a transaction. Whether the client has said goodbye meanwhile."""
        owed = 0
        while True:
            for kind, message in coming:
                if kind == b"X":
                    raise Gone
                if kind == b"P" and not message[5:].startswith(b"\0"):
                    self.named.append(message[5:].split(b"\0")[0])
                owed += kind in b"QSF"
                server.end.sendall(message)
            coming = []
            for end in select.select([client.end, server.end], [], [])[0]:
                if end is client.end:
                    client.fill()
                    coming = client.messages()
                    continue
                server.fill()
                for kind, message in server.messages():
                    client.end.sendall(message)
                    owed -= kind == b"Z"
                    if kind == b"Z" and message[5:] == b"I" and not owed and not coming:
                        return False

    def close(self) -> None:
        super().close()
        for line in self._lines:
            line.close()
