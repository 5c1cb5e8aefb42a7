"""Why no connection could be made: by codes, never by words, which servers write in their own language.

Psycopg passes on libpq's words only. So what failed is tried once more, while libpq notes down what both sides send.
Where it cannot do so (it can on Linux), causes are not told apart, and a login is tried until the caller's deadline.
"""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import ssl
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_attempts, conninfo_to_dict, make_conninfo
from psycopg.pq import PGconn, PollingStatus

from persist_lib.errors import Determinate, InvalidUsage, PersistError
from persist_lib.location.wrap.deadline import patience_s
from persist_lib.runtime.ambient import Deadline, Runtime

T = TypeVar("T")
CONNECT_S = 10
ANSWER_S = 30.0
"""The longest that one statement may take: longer than the server may wait for the lock under which tables are made."""


class Connection(psycopg.Connection):
    """A connection whose every statement is answered in bounded time, or fails: then the connection is closed.

    Psycopg waits for an answer as long as the connection stands, which is for ever where a firewall drops packets. A
    statement that is sent while a location is opened has no other deadline.
    """

    runtime: Runtime

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **kwargs: Any) -> T:
        """As psycopg's, which asks `gen` some ten times a second while nothing comes."""
        return super().wait(self._bounded(gen), *args, **kwargs)

    def _bounded(self, gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
        deadline = self.runtime.deadline(patience_s(ANSWER_S))
        try:
            awaited = next(gen)
            while True:
                ready = yield awaited
                if not ready and deadline.has_passed():
                    self.pgconn.finish()  # so that nothing more is sent: what the server does is not known
                    raise psycopg.OperationalError(f"no answer within {deadline.timeout_s:.3g} s")
                awaited = gen.send(ready)
        except StopIteration as done:
            found: T = done.value
            return found


def connect(conninfo: str, deadline: Deadline) -> Connection:
    """Connect, in autocommit. Raises psycopg.Error.

    Psycopg's own prepared statements are off: their names mean something else in another client of a pooler.
    """
    timeout_s = max(2, min(CONNECT_S, int(deadline.remaining_s())))
    with dialling():
        found = Connection.connect(conninfo, autocommit=True, prepare_threshold=None, connect_timeout=timeout_s)
    found.runtime = deadline.runtime
    return found


@contextmanager
def dialling() -> Iterator[None]:
    """Make a psycopg.Error of what psycopg raises where the process has no descriptor left to wait for a server by."""
    try:
        yield
    except OSError as error:
        raise psycopg.OperationalError(str(error)) from error


FOR_GOOD = re.compile(rb"28...|3D000|42501")
"""Codes of servers and poolers that reject a login: who it is, the database, and a right that is missing there.

A pooler that says another code of these, as older ones do (08P01 of everything), is asked again until the deadline.
"""
CODE = re.compile(rb'\tErrorResponse\t(?: [A-Z] "[^"]*")*? C "(\w{5})"')
ASKED_TLS = re.compile(rb"\tSSLResponse\t (.)\s*\Z")
"""The answer to the question for TLS, where nothing came after it: libpq stopped there."""
LOOK_S = 5.0
"""How long not to look again where nothing is wrong for good. Psycopg keeps some 5 KB of each look for ever."""
_NEXT_LOOK: defaultdict[str, float] = defaultdict(lambda: float("-inf"))
ROOT, OWN, KEY = (f".postgresql/{name}" for name in ("root.crt", "postgresql.crt", "postgresql.key"))
"""Where libpq looks for authorities, and for a certificate and a key of the client's own, in the home directory."""
LOGIN = (
    "Check user, password and database in the URL, and what the server's pg_hba.conf lets in. Nothing was sent, and "
    "trying again would not help"
)
CERTIFICATE = (
    "Check sslcert and sslkey (PEM), the client's own, which only their owner may read. Nothing was sent, and trying "
    "again would not help"
)
TRUST = "Check sslmode, sslrootcert (the bundle of the server's authority, PEM) and the host in the URL"


def connected(conninfo: str, name: str, deadline: Deadline) -> Connection:
    """Connect to a database. `name` is that for messages."""
    try:
        return connect(conninfo, deadline)
    except psycopg.Error as error:
        raise connection_failed(error, name, conninfo, deadline) from error


def connection_failed(error: psycopg.Error, name: str, conninfo: str, deadline: Deadline) -> PersistError:
    """Return the error for a connection that could not be made. Nothing was sent."""
    what = f"could not connect to {name}: {str(error).strip()}"
    cause = None
    if not isinstance(error, psycopg.errors.ConnectionTimeout) and deadline.runtime.monotonic() >= _NEXT_LOOK[conninfo]:
        cause = _cause(conninfo, deadline)
    if cause is None:
        _NEXT_LOOK[conninfo] = deadline.runtime.monotonic() + LOOK_S
    return Determinate(what) if cause is None else InvalidUsage(f"{what}. {cause}", name=name)


def _cause(conninfo: str, deadline: Deadline) -> str | None:
    """Why every host rejects us for good; None if one does not, as a host that is only down may accept the login.

    A host may have several addresses: a rejection from one of them counts for all.
    """
    found: dict[tuple[Any, Any], str | None] = {}
    try:
        for attempt in conninfo_attempts(conninfo_to_dict(conninfo)):
            host = attempt.get("host"), attempt.get("port")
            found[host] = found.get(host) or _cause_at(make_conninfo("", **attempt), deadline)
    except (psycopg.Error, OSError):
        return None  # no host has an address, or there is no descriptor left to look by
    if None in found.values():
        return None
    return next(cause for cause in (CERTIFICATE, TRUST, LOGIN) if cause in found.values())


def _cause_at(conninfo: str, deadline: Deadline) -> str | None:
    if sys.platform != "linux":
        return None
    with ExitStack() as stack:
        notes = os.memfd_create("persist")  # never a file: the password may be among them
        stack.callback(os.close, notes)
        pgconn = PGconn.connect_start(conninfo.encode())
        stack.callback(pgconn.finish)
        pgconn.trace(notes)
        stack.callback(pgconn.untrace)
        while (status := pgconn.connect_poll()) in (PollingStatus.READING, PollingStatus.WRITING):
            poll = select.poll()
            poll.register(pgconn.socket, select.POLLIN if status == PollingStatus.READING else select.POLLOUT)
            if not poll.poll(deadline.remaining_s() * 1000):
                return None
        pgconn.untrace()  # writes what it has kept
        noted = os.pread(notes, 1 << 20, 0)
        codes, tls = CODE.findall(noted), ASKED_TLS.search(noted)
        if status == PollingStatus.FAILED and (pgconn.needs_password or (codes and FOR_GOOD.fullmatch(codes[-1]))):
            return LOGIN
        settings = {one.keyword.decode(): one.val.decode() for one in pgconn.info if one.val}
        if tls is None:
            return None
        if tls[1] == b"S" and _has_damaged_certificate(settings):
            return CERTIFICATE
        return TRUST if tls[1] == b"N" or _is_distrusted(settings, deadline) else None


def _file(settings: dict[str, str], option: str, default: str) -> str:
    return settings.get(option) or str(Path.home() / default)


def _has_damaged_certificate(settings: dict[str, str]) -> bool:
    """Whether the client's own certificate or key cannot be used: then libpq hangs up before its handshake."""
    own, key = _file(settings, "sslcert", OWN), _file(settings, "sslkey", KEY)
    if settings.get("sslcertmode") == "disable" or not Path(own).exists() or ":" in key:  # a key that is no file
        return False
    try:
        found = Path(key).stat()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(own, key, settings.get("sslpassword", ""))
    except OSError as error:
        return _says_something(error)
    return bool(found.st_mode & (0o037 if found.st_uid == 0 else 0o077))  # as libpq checks it


def _says_something(error: OSError) -> bool:
    """Whether a file that could not be read is to blame, and not that this process has no descriptor left."""
    return isinstance(error, ssl.SSLError) or error.errno not in (errno.EMFILE, errno.ENFILE)


def _is_distrusted(settings: dict[str, str], deadline: Deadline) -> bool:
    """Whether a server is not who it should be, by a handshake of our own: libpq has no code for why its one failed."""
    mode, root = settings.get("sslmode", ""), _file(settings, "sslrootcert", ROOT)
    if not mode.startswith("verify") and not Path(root).exists():
        return False
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = mode == "verify-full"
    try:
        context.load_default_certs() if root == "system" else context.load_verify_locations(root)
    except OSError as error:
        return _says_something(error)  # no such bundle, or an invalid one
    address = settings.get("hostaddr") or settings["host"], int(settings["port"])
    try:
        with socket.create_connection(address, deadline.left_s()) as plain:
            plain.sendall(b"\0\0\0\x08\x04\xd2\x16\x2f")  # asks for TLS
            plain.recv(1)
            context.wrap_socket(plain, server_hostname=settings["host"]).close()
    except OSError as error:
        return isinstance(error, ssl.SSLCertVerificationError)
    return False
