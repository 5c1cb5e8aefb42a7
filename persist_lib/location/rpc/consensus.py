"""A Consensus whose operations a shard server carries out, and which takes commands instead of rows.

    persist://host:7600                     one server
    persist://host:7600,other:7600          several: whichever is there
    persist://host:7600?credentials=/path   the token is in that file; else it is taken from $PERSIST_TOKEN, if at all
    persists://host:7600                    over TLS; ?ca=/path are its authorities, else those that gRPC comes with
    persists://…?cert=/path&key=/path       with a certificate of the client's own, where the server asks for one
    persist://host:7600?store=URL           where no server answers, on against the consensus at that URL; quoted

It needs no credentials of the store. Blobs are read and written without the server.

Where no server answers and the client may use the store itself, reads and rows go there as from any client. Commands
are applied by the heart of a server, in this process: a command that a server may hold, which is only paused, is
resolved there by the same rules as by another server. Servers are looked for now and then, and asked again as soon as
one is there.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote

from persist_lib.arguments import shown
from persist_lib.core.plan.look import Debts
from persist_lib.errors import Determinate, InvalidUsage, PersistError
from persist_lib.format import wire
from persist_lib.ids import SeqNo
from persist_lib.location.api import Blob, Change, Consensus, Newest, Row
from persist_lib.location.commands import Answered, Heart, MakesHeart, Proposed
from persist_lib.location.rpc.credentials import Credentials, Tls, check_secret
from persist_lib.location.rpc.servers import Servers, Unreached
from persist_lib.location.rpc.subscriptions import Subscriptions
from persist_lib.location.scheme import Opening, Stores
from persist_lib.location.wrap.deadline import retry, within
from persist_lib.runtime.ambient import Backoff, Runtime
from persist_lib.runtime.forks import Stage, enrol

log = logging.getLogger("persist")
CHECK_S = 0.25
"""How long a server may take to answer that it is there."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""How long to wait until servers are looked for again; each time twice as long."""


class FallbackStore:
    """The store at `url`, which is opened when it is first needed. Safe to use from several threads."""

    def __init__(self, url: str, stores: Stores, servers: Servers, runtime: Runtime) -> None:
        self._url, self._stores, self._servers, self._runtime = url, stores, servers, runtime
        self._lock = threading.Lock()
        self._opened: tuple[Blob, Consensus] | None = None
        self._heart: Heart | None = None
        self._is_away, self._is_closed = False, False
        self._backoff, self._next_look = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0.0
        enrol(self, Stage.STORES)

    def after_fork_in_child(self) -> None:
        """Make a new lock and, when needed, a new heart: the threads of this one are the parent's."""
        self._lock, self._heart = threading.Lock(), None

    @property
    def is_in_use(self) -> bool:
        """Whether this store is asked now, and no server. Looks for servers, if that is due."""
        if self._is_away and self._is_due() and self._servers.is_there(CHECK_S):
            self._is_away = False
            log.info("a shard server answers again, and is asked from now on")
        return self._is_away

    def leave(self, error: Exception) -> None:
        """Ask this store from now on, until a server is there again. Raises what keeps it from being opened."""
        self.consensus()
        if not self._is_away:
            with self._lock:
                self._is_away = True
                self._backoff.reset()
                self._next_look = self._runtime.monotonic() + self._backoff.take()
            log.warning("no shard server answers, so this client asks the store itself until one does: %s", error)

    def consensus(self) -> Consensus:
        return self._stores_opened()[1]

    def heart(self, make: MakesHeart) -> Heart:
        """What applies commands to this store. It is made when it is first needed."""
        blob, consensus = self._stores_opened()
        with self._lock:
            self._heart = self._heart or make(blob, consensus, self._runtime)
            return self._heart

    def close(self) -> None:
        with self._lock:
            heart, opened, self._heart, self._opened = self._heart, self._opened, None, None
        if heart is not None:
            heart.end()
        if opened is not None:
            with suppress(PersistError):
                opened[1].close()

    def _stores_opened(self) -> tuple[Blob, Consensus]:
        with self._lock:
            if self._opened is None:
                self._opened = self._stores.open(self._url)
            return self._opened

    def _is_due(self) -> bool:
        """Whether this thread is the one that looks for servers now."""
        with self._lock:
            now = self._runtime.monotonic()
            if now < self._next_look:
                return False
            self._next_look = now + self._backoff.take()
            return True


T = TypeVar("T")
OPTIONS = ("credentials", "ca", "cert", "key")
"""The other parts of a URL. Each is the path of a file."""
STORE = "store"
"""The option that is the URL of the consensus behind the servers."""
ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")


def parts(url: str) -> tuple[list[str], dict[str, str]]:
    """The addresses of a URL, and the paths of its options."""
    before, _, query = url.partition("://")[2].partition("?")
    options, addresses = parse_qsl(query, keep_blank_values=True), before.split(",")
    if "@" in before or {"token", "password", "secret"} & dict(options).keys():  # not quoted: it may be a secret
        raise InvalidUsage(
            "a token never goes into the URL of a shard server, where logs and process lists show it. Set "
            "PERSIST_TOKEN, or name a file that holds it, as in persist://host:7600?credentials=/path"
        )
    if not all(match and int(match[2]) < 65536 for match in map(ADDRESS.fullmatch, addresses)):
        raise InvalidUsage(
            f"shard servers are named by host and port, as in 'persist://localhost:7600,other:7600': got {shown(url)}",
            url=url,
        )
    if len(dict(options)) < len(options) or not all(name in (*OPTIONS, STORE) and path for name, path in options):
        raise InvalidUsage(
            f"the options of shard servers are {', '.join(OPTIONS)}, each once and with the path of a file, and "
            f"{STORE}, with a quoted URL: got {shown(url)}",
            url=url,
        )
    return addresses, dict(options)


def joined(url: str, addresses: Sequence[str], options: Mapping[str, str]) -> str:
    """The URL with the scheme of another one, and with these addresses and options."""
    told = "&".join(f"{name}={quote(value, '' if name == STORE else '/')}" for name, value in options.items())
    return f"{url.partition(':')[0]}://{','.join(addresses)}{f'?{told}' if told else ''}"


def canonical(url: str) -> str:
    """The URL, which means the same in any process. Raises InvalidUsage for invalid addresses."""
    addresses, files = parts(url)
    # Not resolved: what a link leads to changes when secrets are replaced.
    paths = {name: path if name == STORE else str(Path(path).absolute()) for name, path in files.items()}
    return joined(url, addresses, paths)


def named(url: str, opening: Opening) -> str:
    """The URL with that of the store behind the servers as any process understands it."""
    addresses, files = parts(url)
    if STORE not in files:
        return url
    if opening.stores is None or files[STORE].startswith(("persist:", "persists:")):
        raise InvalidUsage(
            "the option store of shard servers is the URL of the consensus that they use themselves, as in "
            f"persist://host:7600?store=postgresql://user@host/database: got {shown(url)}",
            url=url,
        )
    return joined(url, addresses, files | {STORE: opening.stores.url_of(files[STORE])})


def open_consensus(url: str, opening: Opening) -> RpcConsensus:
    """Open the Consensus of the servers at `url`. Raises Determinate if none of them answers."""
    addresses, files = parts(url)
    credentials = Credentials(files.get("credentials"))
    if not url.startswith("persists:"):
        check_secret(addresses, credentials)
    stores = opening.stores if STORE in files else None
    servers = Servers(addresses, opening.runtime, credentials, _tls(url, files), has_store=stores is not None)
    if stores is None:
        return RpcConsensus(servers, timeout_s=opening.timeout_s)
    return RpcConsensus(servers, FallbackStore(files[STORE], stores, servers, opening.runtime))


def _tls(url: str, files: Mapping[str, str]) -> Tls | None:
    given = [name for name in ("ca", "cert", "key") if name in files]
    if url.startswith("persists:"):
        return Tls(files)
    if given:
        raise InvalidUsage(f"the options {', '.join(given)} are for TLS: write persists:// for it, as in "
                           f"persists://host:7600?ca=/path. Got {shown(url)}", url=url)  # fmt: skip
    return None


class RpcConsensus:
    """Consensus by way of shard servers. A read is linearizable where that of any Consensus is: they scan the store.

    With `fallback`, it asks that store itself while no server is there. Without, servers that do not answer yet, as
    those of a loaded machine, are asked again for `timeout_s`; where none listens, that is said at once.
    """

    def __init__(self, servers: Servers, fallback: FallbackStore | None = None, timeout_s: float = 0.0) -> None:
        self._servers, self._fallback = servers, fallback
        deadline = servers.runtime.deadline(timeout_s)
        greet = partial(self._call, "now", kind=type(None), alone=lambda _store: None)
        try:
            greet()
        except Determinate as error:
            if deadline.has_passed() or (isinstance(error.__cause__, Unreached) and not error.__cause__.is_slow):
                raise
            within(deadline, lambda: retry(greet, is_idempotent=True, deadline=deadline))
        self._subscriptions = Subscriptions(servers, servers.runtime)

    def head(self, key: str) -> Row | None:
        return self._call("head", key, kind=Row | None, route=key)

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        rows: list[Row] = []
        began = self._subscriptions.scanning(key)
        while True:
            page, is_last = self._page(key, SeqNo(rows[-1].seqno + 1) if rows else from_seqno, limit - len(rows))
            rows += page
            if is_last or len(rows) >= limit:
                break
        if len(rows) < limit:
            self._subscriptions.scanned(key, began, rows[-1].seqno if rows else SeqNo(0))
        return rows

    def _page(self, key: str, from_seqno: SeqNo, limit: int) -> tuple[list[Row], bool]:
        return self._call(
            "scan", key, from_seqno, limit, kind=tuple[list[Row], bool], route=key,
            alone=lambda store: (store.scan(key, from_seqno, limit), True),
        )  # fmt: skip

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        return self._call("compare_and_set", key, expected, data, kind=bool, route=key, reads=False)

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        route = min(changes, default="")
        return self._call("compare_and_set_many", dict(changes), kind=bool, route=route, reads=not changes)

    def commit_commands(
        self, proposed: Sequence[Proposed], token: bytes, timeout_s: float, *, is_repeated: bool, heart: MakesHeart
    ) -> list[Answered]:
        deadline = self._servers.runtime.deadline(timeout_s)
        # SUBTLE: never as rows of this client's own. A server that is paused may hold the command, and only the heart
        # looks for its token and says "not committed" of nothing else than what can never be.
        return self._asked(
            lambda: self._sent(proposed, token, timeout_s, is_repeated=is_repeated),
            lambda store: store.heart(heart).commit_commands(
                proposed, token, deadline.left_s(), is_repeated=is_repeated
            ),
        )

    def _sent(
        self, proposed: Sequence[Proposed], token: bytes, timeout_s: float, *, is_repeated: bool
    ) -> list[Answered]:
        commands = tuple((one.shard, one.known, *wire.encode_command(one.command)) for one in proposed)
        asked = wire.Commit(token, is_repeated, commands)
        route = min(one.shard for one in proposed)
        found = self._servers.call("commit", asked, list[wire.Answer], route=route, reads=False, seconds=timeout_s)
        return [
            Answered(
                one.seqno, one.refusal and wire.decode_refusal(*one.refusal), one.is_committed,
                tuple(Row(*row) for row in one.rows), one.outcome, one.due,
            )
            for one in found
        ]  # fmt: skip

    def truncate(self, key: str, seqno: SeqNo) -> int:
        return self._call("truncate", key, seqno, kind=int, route=key, reads=False)

    def rewind(self, key: str, seqno: SeqNo, newest: Newest) -> int:
        return self._call("rewind", key, seqno, newest, kind=int, route=key, reads=False)

    def list_keys(self) -> Iterator[str]:
        return iter(self._call("list_keys", kind=list[str], alone=lambda store: list(store.list_keys())))

    def heads(self, keys: Sequence[str] | None = None) -> dict[str, SeqNo]:
        return self._call("heads", None if keys is None else list(keys), kind=dict[str, SeqNo])

    @property
    def answers_debts(self) -> bool:
        return True

    def debts(self, settings: str, done: Mapping[str, Sequence[str]], most: int | None, seconds: float) -> Debts | None:
        names = {duty: list(names) for duty, names in done.items()}
        kind = Debts | None
        return self._call("debts", settings, names, most, seconds, kind=kind, alone=lambda _: None, takes_s=seconds)

    def losing(self, table: str, timeline: str | None) -> list[str]:
        return self._call("losing", table, timeline, kind=list[str], alone=lambda _: [])

    def now(self) -> int:
        if self._fallback is not None and self._fallback.is_in_use:
            return self._fallback.consensus().now()
        return self._servers.now()

    def wait(self, key: str, seqno: SeqNo, longest_s: float) -> bool:
        return self._subscriptions.wait(key, seqno, longest_s)

    def pushed(self, key: str, after: SeqNo) -> Sequence[Row] | None:
        return self._subscriptions.pushed(key, after)

    def close(self) -> None:
        self._subscriptions.close()
        if self._fallback is not None:
            self._fallback.close()
        self._servers.close()

    def _call(
        self, name: str, *given: object, kind: object, alone: Callable[[Consensus], object] | None = None,
        route: str = "", reads: bool = True, takes_s: float = 0.0,
    ) -> Any:  # fmt: skip
        """The answer of a server or, where none is there, that of the store behind them: of the same, or of `alone`."""
        sent = given if len(given) > 1 else next(iter(given), None)
        return self._asked(
            lambda: self._servers.call(name, sent, kind, route=route, seconds=None, reads=reads, takes_s=takes_s),
            lambda behind: (alone or methodcaller(name, *given))(behind.consensus()),
        )

    def _asked(self, ask: Callable[[], T], alone: Callable[[FallbackStore], T]) -> T:
        fallback = self._fallback
        if fallback is None or not fallback.is_in_use:
            try:
                return ask()
            except Unreached as gone:
                if fallback is None:
                    raise Determinate(str(gone)) from gone
                fallback.leave(gone)
        return alone(fallback)
