"""Who may do what through a shard server, and how much at a time: clients by tokens; rights by shards and by tables.

    [clients.loader]
    sha256 = "1f2e…"                                 # the SHA-256 of its token, in hex; or token = "…"
    rights = { "orders.*" = ["read", "append"], "prices" = ["read"] }
    tables = { "sales" = ["read", "append"] }        # all shards of the table, whatever carries it
    holds = ["spark-*"]                              # the holds that it owns, beside the one named `loader`

A name that ends in `*` stands for all shards whose names begin so. A token is a secret that a machine made: 32 random
bytes cannot be guessed, so that a plain hash keeps them. Certificates are read again when their files change, for the
connections made from then on.
"""

from __future__ import annotations

import hmac
import re
import ssl
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509

from persist_lib.arguments import UNPARSED, shown
from persist_lib.catalog.catalog import NOTHING, Catalog, Contents
from persist_lib.catalog.records import minted, rendition_shard
from persist_lib.catalog.wal import minted_timeline, wal_shard
from persist_lib.client import Client
from persist_lib.core.rights import RIGHTS, Needed, Right, missing
from persist_lib.errors import InvalidUsage, NotAllowed, NotAuthenticated, Overloaded
from persist_lib.ids import CATALOG, KEPT
from persist_lib.location.rpc.credentials import SCHEME, is_token
from persist_lib.runtime.reread import Reread

TablesOf = Callable[[str], Sequence[str]]
Shards = Mapping[str, Sequence[str]]
"""Shards, and of which tables each is."""
FRESH_S = 1.0
"""For how long a table that was renamed, or dropped and made again, may still count as what it was."""


class TableNames:
    """The names of the tables that each shard has rows of. Safe to use from several threads.

    A shard that stands by itself is the table of its name. One of a collection is that collection's, by its minted id,
    whatever it is called now; the WAL of a timeline is that of all of its tables.
    """

    def __init__(self, client: Client) -> None:
        self._catalog, self._now = Catalog(client), client.runtime.monotonic
        self._lock = threading.Lock()
        self._contents: Contents = NOTHING
        self._names: Mapping[str, Sequence[str]] = {}
        self._read_s = float("-inf")

    def of(self, shard: str) -> Sequence[str]:
        """The tables of a shard, as far as is known; none for one that is no table's, or of a table not known yet."""
        found = self._names.get(shard) or self._names.get(shard.partition(".")[0])
        return found or (() if KEPT.fullmatch(shard) else (shard,))

    def promoted(self, table: str, timeline: str | None) -> list[tuple[Shards, Shards]]:
        """What those need who use the tables that a promotion changes: shards and their tables, before and after it."""
        made: Shards = {rendition_shard(minted(0)): (table,)}  # patterns of names match its id or, to be sure, do not
        before = made if self._contents.named(table) is not None else {table: (table,)}
        if timeline is None:
            return [(before, made)]
        record = next((one for one in self._contents.timelines.values() if one.name == timeline), None)
        wal = wal_shard(minted_timeline(0, "wal") if record is None else record.id)
        on = self._names.get(wal, ())
        joined: Shards = {wal: (*on, table)}
        return [(before, {**made, **joined}), *([({wal: on}, joined)] if on else [])]

    def is_older(self, seconds: float) -> bool:
        return self._now() - self._read_s > seconds

    def refresh(self) -> None:
        """Read what has changed in the catalog: one request, if nothing has."""
        with self._lock:
            began = self._now()
            if (contents := self._catalog.fetch()) is not self._contents:
                self._names, self._contents = _names(contents), contents
            self._read_s = began

    def close(self) -> None:
        self._catalog.close()


def _names(contents: Contents) -> dict[str, Sequence[str]]:
    every = contents.collections
    # The deleted keys that a table keeps are that table's: who may use it may use them.
    found: dict[str, Sequence[str]] = {id_: (every.get(one.marks_of, one).name,) for id_, one in every.items()}
    for (collection, _), rendition in contents.renditions.items():
        found |= {place: found.get(collection, ()) for place in rendition.places}
    for id_ in contents.timelines:
        tables = (one for one in every.values() if one.timeline == id_ and not one.marks_of)
        on = [one.name for one in tables if one.state != "dropping"]
        found[wal_shard(id_)] = tuple(on)
    return found


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
PATTERN = re.compile(r"[A-Za-z0-9_.-]*\*?")
TABLES = re.compile(r"[A-Za-z0-9_./-]*\*?")
DIGEST = re.compile(r"[0-9a-fA-F]{64}")
REPLACING_S = 0.1
"""How long new certificates wait before they replace those of connections that begin just now."""
_WHAT_TO_DO = (
    "Nothing was done. Set PERSIST_TOKEN, or name a file with the token in the URL, as in "
    "persist://host:7600?credentials=/path"
)


@dataclass(frozen=True, slots=True)
class Caller:
    """A client that the server knows: its name, which the log shows, and its rights by name or pattern of shards.

    It has those of `tables` on all shards of a table, which `tables_of` knows; on what several tables share, such as a
    WAL, those that it has on each of them; and it reads the catalog, which says what these shards are. It owns the hold
    that has its own name, and those that match `holds`, which are names and patterns too.
    """

    name: str
    rights: Mapping[str, frozenset[Right]]
    digest: bytes = field(default=b"", repr=False)
    holds: tuple[str, ...] = ()
    tables: Mapping[str, frozenset[Right]] = field(default_factory=dict)
    tables_of: TablesOf = lambda shard: (shard,)

    def owns(self, hold: str) -> bool:
        return hold == self.name or any(_matches(pattern, hold) for pattern in self.holds)

    def rights_on(self, shard: str) -> frozenset[Right]:
        """The rights on one shard, of all patterns that it matches, and by the tables that it is of."""
        return self.rights_as(shard, self.tables_of(shard) if self.tables else ())

    def rights_as(self, shard: str, tables: Sequence[str]) -> frozenset[Right]:
        found = _granted(self.rights, shard) | (READS if self.tables and shard == CATALOG else frozenset())
        return found | (frozenset.intersection(*(_granted(self.tables, one) for one in tables)) if tables else found)

    def check(self, shard: str, needed: Needed, what: str) -> None:
        """Raise NotAllowed unless this client has the rights on a shard that `what` needs."""
        if lacking := missing(needed, self.rights_on(shard)):
            needs = " and ".join(" or ".join(sorted(one)) for one in lacking)
            raise NotAllowed(
                f"the client {self.name} may not {what} shard {shown(shard)}: it lacks the right to {needs}. This call "
                "did nothing; the server's operator gives rights, in its token file",
                client=self.name, shard=shard, needs=needs,
            )  # fmt: skip


def anybody(peer: str) -> Caller:
    """The caller of a server without a token file: it may do everything."""
    return Caller(peer, {"*": frozenset(RIGHTS)})


class Access:
    """The clients of a token file, which is read again when it changes."""

    def __init__(self, path: Path, tables_of: TablesOf = lambda shard: (shard,)) -> None:
        """Raises InvalidUsage if the file cannot be read or is wrong. No message has a token."""
        self.file = Reread([path], f"the token file {path}", lambda found: _parse(found[0], path, tables_of))

    def losing(self, now: Shards, then: Shards) -> list[str]:
        """The clients who would lose a right, if they needed the shards `then` in the place of the shards `now`."""
        return [one.name for one in self.file.get() if not _common(one, now) <= _common(one, then) & _catalog_of(one)]

    def caller(self, metadata: Sequence[tuple[str, str | bytes]] | None) -> Caller:
        """The client that made a call with this metadata. Raises NotAuthenticated."""
        given = [value for name, value in metadata or () if name == "authorization"]
        if not given:
            raise NotAuthenticated(f"this shard server serves clients with a token, and none was sent. {_WHAT_TO_DO}")
        text = given[0]
        if len(given) > 1 or not isinstance(text, str) or not text.startswith(SCHEME):
            raise NotAuthenticated(f"what was sent to this shard server is no token. {_WHAT_TO_DO}")
        digest = sha256(text.removeprefix(SCHEME).encode(errors="replace")).digest()
        # All are compared, each in constant time: how long it takes tells nothing about any of them.
        found = [one for one in self.file.get() if hmac.compare_digest(one.digest, digest)]
        if not found:
            raise NotAuthenticated(f"this shard server does not know the token that was sent. {_WHAT_TO_DO}")
        return found[0]


READS: frozenset[Right] = frozenset({"read"})


def _common(caller: Caller, shards: Shards) -> frozenset[Right]:
    """The rights that a client has on all of these shards."""
    found = [caller.rights_as(shard, tables if caller.tables else ()) for shard, tables in shards.items()]
    return frozenset.intersection(*found) if found else frozenset(RIGHTS)


def _catalog_of(caller: Caller) -> frozenset[Right]:
    """All rights, if a client sees the catalog, without which no collection is found."""
    return frozenset(RIGHTS) if caller.rights_on(CATALOG) else frozenset()


def _granted(rights: Mapping[str, frozenset[Right]], name: str) -> frozenset[Right]:
    return frozenset().union(*(found for pattern, found in rights.items() if _matches(pattern, name)))


def _matches(pattern: str, shard: str) -> bool:
    return shard.startswith(pattern[:-1]) if pattern.endswith("*") else shard == pattern


def _parse(data: bytes, path: Path, tables_of: TablesOf) -> list[Caller]:
    try:
        found = tomllib.loads(data.decode())
    except UNPARSED:
        # Without its cause: what a parser quotes may be a token.
        raise InvalidUsage(f"the token file {path} is no TOML; see docs/shard-server.md", path=str(path)) from None
    clients = found.pop("clients", None)
    if found or not isinstance(clients, dict) or not clients:
        raise InvalidUsage(
            f"the token file {path} must have tables [clients.NAME], at least one, and nothing else", path=str(path)
        )
    callers = [_caller(name, entry, path, tables_of) for name, entry in clients.items()]
    by_digest: dict[bytes, str] = {}
    for caller in callers:
        if (other := by_digest.setdefault(caller.digest, caller.name)) != caller.name:
            raise _wrong(path, caller.name, f"has the token of {other}: give each client its own")
    return callers


def _caller(name: str, entry: object, path: Path, tables_of: TablesOf) -> Caller:
    if not NAME.fullmatch(name):
        raise InvalidUsage(
            f"the token file {path}: a client's name must be 1 to 64 letters, digits, '_', '-' or '.': "
            f"got {shown(name)}",
            path=str(path),
        )
    keys = set(entry) - {"holds"} if isinstance(entry, dict) else set()
    granted = keys & {"rights", "tables"}
    if not isinstance(entry, dict) or not granted or keys - granted not in ({"token"}, {"sha256"}):
        raise _wrong(path, name, "must have rights or tables, either sha256 or token, perhaps holds, and nothing else")
    token, digest = entry.get("token"), entry.get("sha256")
    if digest is None and not is_token(token):
        raise _wrong(path, name, "must have a token of 20 to 512 letters, digits and '-._~+/='")
    if digest is not None and not (isinstance(digest, str) and DIGEST.fullmatch(digest)):
        raise _wrong(path, name, "must have as sha256 the 64 hex digits of its token's SHA-256")
    known = bytes.fromhex(digest) if digest is not None else sha256(str(token).encode()).digest()
    rights, tables = (_rights(entry.get(what, {}), name, path, what) for what in ("rights", "tables"))
    return Caller(name, rights, known, _holds(entry.get("holds", []), name, path), tables, tables_of)


def _holds(given: Any, name: str, path: Path) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(one, str) and one and PATTERN.fullmatch(one) for one in given):
        raise _wrong(path, name, "must have as holds a list of names, or starts of names and '*', as in [\"spark-*\"]")
    return tuple(given)


def _rights(given: Any, name: str, path: Path, what: str) -> dict[str, frozenset[Right]]:
    kind, names = ("table", TABLES) if what == "tables" else ("shard", PATTERN)
    if not isinstance(given, dict):
        raise _wrong(path, name, f'must have {what} by {kind}, as in {what} = {{ "orders.*" = ["read", "append"] }}')
    for pattern, rights in given.items():
        if not pattern or not names.fullmatch(pattern):
            raise _wrong(path, name, f"must name a {kind}, or the start of names and '*': got {shown(pattern)}")
        if not isinstance(rights, list) or not all(right in RIGHTS for right in rights):
            raise _wrong(path, name, f"must have for {shown(pattern)} a list of {', '.join(RIGHTS)}")
    return {pattern: frozenset(rights) for pattern, rights in given.items()}


def _wrong(path: Path, name: str, what: str) -> InvalidUsage:
    return InvalidUsage(f"the token file {path}: the client {name} {what}", path=str(path), client=name)


COMMANDS_MOST = 4096
"""The most commands and other calls under way."""
COMMANDS_OF_A_CLIENT = 1024
BYTES_MOST = 256 << 20
"""The most bytes of messages under way; the values made of them take a few times that."""
BYTES_OF_A_CLIENT = 96 << 20
"""One message of the largest size fits in."""


class Load:
    """What is under way, by client. For one thread: a server's loop."""

    def __init__(
        self, commands: int = COMMANDS_MOST, commands_of_a_client: int = COMMANDS_OF_A_CLIENT,
        size: int = BYTES_MOST, size_of_a_client: int = BYTES_OF_A_CLIENT,
    ) -> None:  # fmt: skip
        self._bounds = (("commands", commands, commands_of_a_client), ("bytes", size, size_of_a_client))
        self.commands = self.bytes = 0
        self._of: dict[str, Counter[str]] = {"commands": Counter(), "bytes": Counter()}

    @property
    def clients(self) -> int:
        return len(self._of["commands"])

    def take(self, client: str, commands: int, size: int) -> None:
        """Count a call of so many commands and bytes. Raises Overloaded, and counts nothing, if it is too much."""
        for (what, most, of_a_client), more in zip(self._bounds, (commands, size), strict=True):
            for has, bound, whose in (
                (self._of[what][client], of_a_client, client),
                (getattr(self, what), most, "all clients"),
            ):
                if has + more > bound:
                    raise Overloaded(
                        f"{has} {what} of {whose} are under way in this server, and at most {bound} may be. This call "
                        f"of {more} was not taken, and nothing was done; wait for an answer, and try again",
                        waiting=has, most=bound,
                    )  # fmt: skip
        self._add(client, commands, size)

    def give_back(self, client: str, commands: int, size: int) -> None:
        self._add(client, -commands, -size)

    def _add(self, client: str, commands: int, size: int) -> None:
        self.commands += commands
        self.bytes += size
        for counted, more in zip(self._of.values(), (commands, size), strict=True):
            counted[client] += more
            if not counted[client]:
                del counted[client]


class Certificates:
    """A certificate chain and its private key (PEM), and the authorities that clients' certificates must come from.

    Without `client_ca`, clients need no certificate.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        """Raises InvalidUsage if a file cannot be read, or the key is not that of the certificate."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        paths = [cert, key] if client_ca is None else [cert, key, client_ca]
        self.files = Reread(paths, f"the TLS files {', '.join(map(str, paths))}", self._checked)

    def credentials(self, sleep: Callable[[float], None]) -> grpc.ServerCredentials:
        """What a gRPC server listens with, on one port. It asks for the certificates at each connection.

        The answer is a configuration only where the files have changed, and none as long as they have not: gRPC makes
        its handshakes by another factory with each one that it gets, and frees the last without a look at whether a
        connection beside is about to use it (its issue 36693, in every version), which ends the process. The lock that
        it holds keeps off those that have not asked yet; the pause lets those that have asked begin.
        """
        given = self.files.get()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            found = self.files.get()
            if found is given:
                return None
            sleep(REPLACING_S)
            given = found
            return found

        return grpc.dynamic_ssl_server_credentials(
            given, changed, require_client_authentication=self._client_ca is not None
        )

    def not_after(self) -> float:
        """When the first certificate of the chain in force expires, in seconds since 1970."""
        self.files.get()
        return self._not_after

    def _checked(self, found: Sequence[bytes]) -> grpc.ServerCertificateConfiguration:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Never asks for a passphrase: an encrypted key is an error.
            context.load_cert_chain(self._cert, self._key, password=lambda: b"")
            if self._client_ca is not None:
                context.load_verify_locations(cadata=found[2].decode())
            chain = x509.load_pem_x509_certificates(found[0])
        except (OSError, ValueError) as error:  # SSLError is an OSError
            raise InvalidUsage(
                f"the TLS files {self._cert}, {self._key} and {self._client_ca} are not a certificate, its unencrypted "
                f"private key and authorities of clients, all in PEM: {error}"
            ) from error
        self._not_after = min(one.not_valid_after_utc.timestamp() for one in chain)
        return grpc.ssl_server_certificate_configuration(
            [(found[1], found[0])], root_certificates=found[2] if self._client_ca is not None else None
        )
