"""The calls of clients: who may make them, what they are answered, and how much of them is under way.

A caller is known before its message is read, so that a stranger cannot make the server take one. A call for the store
runs in a thread of a pool; a commit waits in the loop until the funnels have answered it, so that thousands can wait.
When a client goes, its commands are dropped unless they were sent already. A row that a client wrote itself may hold
any change, so writing one needs all rights.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio

from persist_lib.arguments import shown
from persist_lib.client import Client
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.plan.look import Debts, settings_of
from persist_lib.core.rights import ALL, ANY, MAINTAIN, Needed, needed_for
from persist_lib.errors import Indeterminate, InvalidUsage, NotAllowed, PersistError
from persist_lib.format import wire
from persist_lib.ids import SeqNo
from persist_lib.location.api import Consensus, Newest, Row
from persist_lib.location.commands import Answered, Proposed
from persist_lib.location.wrap.deadline import within
from persist_lib.maintain.survey import Survey, Surveyor
from persist_lib.runtime.ambient import Runtime
from persist_lib.server.access import FRESH_S, Access, Caller, Load, TableNames, anybody
from persist_lib.server.metrics import Measures, outcome_of
from persist_lib.shard.funnels import Funnels, ask
from persist_lib.shard.requests import Request

LOOKS_S = 5.0
"""The longest that one request looks at shards."""


class Looks:
    """Answers `debts` from the server's memory: so a survey of ten thousand shards is one request.

    It is the library's own survey. One request to the store tells which shards have moved, by any client. Those that
    this server commits are looked at in its memory; the others are read, for as long as the caller waits. Whatever was
    looked at is kept for the next caller. One survey is under way at a time; those that ask during it share the next.
    """

    def __init__(self, client: Client, consensus: Consensus, funnels: Funnels, pool: Executor) -> None:
        policy, self.pool = client.policy(), pool
        self._settings = settings_of(policy, client.config.rollup_every)
        self._surveyor = Surveyor(
            client.blob, client.reads, consensus, funnels.machine, client.config, client.runtime, policy,
            read_only=False, follows=True,
        )  # fmt: skip
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._asked = self._answers = 0
        self._found: Survey | None = None

    def ask(self) -> int:
        """Note that a call has come. Returns its number: only a survey that begins from now on answers it."""
        with self._lock:
            self._asked += 1
            return self._asked

    def debts(
        self, number: int, caller: Caller, settings: str, done: Mapping[str, Sequence[str]], most: int | None,
        seconds: float,
    ) -> Debts | None:  # fmt: skip
        """What is due on the shards that a caller sees; None if it wants looks by other settings.

        Raises NotAllowed for duties done on shards that the caller may not maintain. Nothing was noted then.
        """
        if settings != self._settings:
            return None
        for name in {name for names in done.values() for name in names}:
            caller.check(name, MAINTAIN, "note duties as done on")
        return _shown(self._survey(number, done, most, min(seconds, LOOKS_S)), caller)

    def _survey(self, number: int, done: Mapping[str, Sequence[str]], most: int | None, seconds: float) -> Survey:
        with self._turn:
            if self._found is not None and self._answers >= number and not done:
                return self._found  # that one began after this call came, so it knows all from before
            with self._lock:
                answers = self._asked
            found = self._surveyor.survey(done, most, seconds, None)
            self._found, self._answers = found, answers
            return found


def _shown(survey: Survey, caller: Caller) -> Debts:
    names = {name for name in survey.heads if caller.rights_on(name)}
    looks = {name: look for name, look in survey.looks.items() if name in names}
    moved = {name: survey.heads[name] for name in names if name not in looks or looks[name].seqno != survey.heads[name]}
    return Debts(survey.now, looks, moved, {name: why for name, why in survey.unread.items() if name in names})


def _first(given: tuple[str, Any]) -> Iterable[str]:
    return (given[0],)


@dataclass(frozen=True, slots=True)
class Raw:
    """One operation: its arguments' type, what it does, which rights it needs on which shards, and what it shows."""

    kind: Any
    call: Callable[[Consensus, Any], Any]
    needed: Needed = ()
    shards: Callable[[Any], Iterable[str]] = lambda _given: ()
    shown: Callable[[Any, Caller], Any] = lambda value, _caller: value


def _scan(consensus: Consensus, given: tuple[str, SeqNo, int]) -> tuple[list[Row], bool]:
    if given[2] < 0:
        raise InvalidUsage(f"{given[2]} is no number of rows. Nothing was done")
    rows = consensus.scan(*given)
    fit = wire.rows_that_fit(rows, lambda row: len(row.data))
    return rows[:fit], fit == len(rows)


def _visible(names: Iterable[str], caller: Caller) -> list[str]:
    return [name for name in names if caller.rights_on(name)]


RAW: Mapping[str, Raw] = {
    "now": Raw(type(None), lambda _consensus, _given: None),
    "head": Raw(str, lambda consensus, given: consensus.head(given), ANY, lambda given: (given,)),
    "scan": Raw(tuple[str, SeqNo, int], _scan, ANY, _first),
    "compare_and_set": Raw(
        tuple[str, Newest | None, bytes], lambda consensus, given: consensus.compare_and_set(*given), ALL, _first
    ),
    "compare_and_set_many": Raw(
        dict[str, tuple[Newest | None, bytes]],
        lambda consensus, given: consensus.compare_and_set_many(given),
        ALL,
        lambda given: given.keys(),
    ),
    "truncate": Raw(tuple[str, SeqNo], lambda consensus, given: consensus.truncate(*given), MAINTAIN, _first),
    "rewind": Raw(tuple[str, SeqNo, Newest], lambda consensus, given: consensus.rewind(*given), ALL, _first),
    "list_keys": Raw(type(None), lambda consensus, _given: list(consensus.list_keys()), shown=_visible),
    "heads": Raw(
        list[str] | None,
        lambda consensus, given: consensus.heads(given),
        shown=lambda heads, caller: {name: heads[name] for name in _visible(heads, caller)},
    ),
}


NUMBERS_BELOW = 1 << 63
"""What every store takes as a number. One below 0 is that of no row, as any other that is not there."""


def _check_numbers(given: Any) -> None:
    """Raise InvalidUsage for a number in a call that some store would fail at."""
    if isinstance(given, int) and not -NUMBERS_BELOW <= given < NUMBERS_BELOW:
        raise InvalidUsage(f"{given} is no number of a row, or of rows. Nothing was done")
    if isinstance(given, dict):
        given = given.values()
    if isinstance(given, Iterable) and not isinstance(given, (str, bytes)):
        for one in given:
            _check_numbers(one)


class Answers:
    """Waits in one event loop. `of` is called there; answers come from any thread."""

    def __init__(self) -> None:
        self._ready: deque[asyncio.Future[None]] = deque()
        self._is_woken = False

    async def of(self, requests: Sequence[Request]) -> list[Answered]:
        """What all of the requests are answered. Raises the first of their errors."""
        loop = asyncio.get_running_loop()
        for request in requests:
            if not request.answer.done():
                told: asyncio.Future[None] = loop.create_future()
                request.answer.add_done_callback(partial(self._answered, loop, told))
                await told
        return [request.answer.result(0) for request in requests]

    def _answered(self, loop: asyncio.AbstractEventLoop, told: asyncio.Future[None], _: Any) -> None:
        self._ready.append(told)
        if not self._is_woken:
            # Before the call. The loop clears it before it looks, so that nothing is left behind.
            self._is_woken = True
            loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_woken = False
        while self._ready:
            told = self._ready.popleft()
            if not told.done():  # else its call was cancelled
                told.set_result(None)


log = logging.getLogger("persist.server")
LONGEST_S = 600.0
"""The longest timeout of a call that is believed."""
REFRESH_S = 5.0
"""How long a call waits for the catalog."""
RECEIVE_S = 20.0
"""How long a message may take to arrive."""
URGENT_BYTES = 4096
"""A larger message is not only a heartbeat."""
ASKED_OF_LOSING = tuple[str, str | None]
ASKED_OF_DEBTS = tuple[str, dict[str, list[str]], int | None, float]
Carry = Callable[[Any, float, Caller, int], Awaitable[Any]]


class Calls:
    """What a server answers. `consensus` is asked directly, in threads of `pool`. For one thread: a server's loop."""

    def __init__(
        self, consensus: Consensus, funnels: Funnels, access: Access | None, runtime: Runtime, pool: Executor,
        measures: Measures, looks: Looks, names: TableNames,
    ) -> None:  # fmt: skip
        self._names = names
        self._consensus, self._funnels, self._access = consensus, funnels, access
        self._runtime, self._pool, self._measures = runtime, pool, measures
        self.looks = looks
        self._told = Answers()
        self.load = Load()
        self._waiting: set[asyncio.Task[Any]] = set()
        self._gives_up = False

    def handlers(self) -> dict[str, Any]:
        calls: dict[str, tuple[Any, Carry]] = {
            "commit": (wire.Commit, self._commit),
            "debts": (ASKED_OF_DEBTS, self._debts),
            "losing": (ASKED_OF_LOSING, self._losing),
            **{name: (raw.kind, partial(self._raw, name, raw)) for name, raw in RAW.items()},
        }
        # As if clients sent a stream, though they send one message: gRPC then reads it when it is asked to.
        return {
            name: grpc.stream_unary_rpc_method_handler(partial(self._serve, name, *call))
            for name, call in calls.items()
        }

    def caller(self, context: Any) -> Caller:
        """Who makes a call. Raises NotAuthenticated."""
        return anybody(context.peer()) if self._access is None else self._access.caller(context.invocation_metadata())

    async def known(self, caller: Caller, seconds: float = FRESH_S) -> None:
        """See to it that rights by tables are by a catalog that was read within the last `seconds`."""
        if caller.tables and self._names.is_older(seconds):
            await self._refresh()

    async def _refresh(self) -> None:
        refresh = partial(within, self._runtime.deadline(REFRESH_S), self._names.refresh)
        await asyncio.get_running_loop().run_in_executor(self._pool, refresh)

    async def _check(self, caller: Caller, needed: Sequence[tuple[str, Needed, str]]) -> None:
        """Raise NotAllowed unless a client has the rights on all of these shards; for certain, where a table is new."""
        await self.known(caller)
        try:
            for one in needed:
                caller.check(*one)
        except NotAllowed:
            if not caller.tables:
                raise
            await self.known(caller, 0)
            for one in needed:
                caller.check(*one)

    def give_up(self) -> None:
        """Answer all commits that wait as unknown."""
        self._gives_up = True
        for task in self._waiting:
            task.cancel()

    async def _serve(self, name: str, kind: Any, carry: Carry, _messages: object, context: Any) -> bytes:
        now, started = self._consensus.now, self._runtime.monotonic()
        received, outcome, reply = b"", "gone", b""
        try:
            caller = self.caller(context)
            received = await _message(context)
            given, timeout_s = wire.decode_call(received, kind)
            value = await carry(given, min(timeout_s, LONGEST_S), caller, len(received))
            reply, outcome = wire.encode_reply(value, now()), self._outcome(value)
        except PersistError as error:
            reply, outcome = wire.encode_error(error, now()), outcome_of(error)
        except Exception as error:
            log.exception("a call failed")
            reply, outcome = wire.encode_error(Indeterminate(f"the server failed: {error!r}"), now()), "unknown"
        finally:
            self._measures.served(name, outcome, self._runtime.monotonic() - started, len(received), len(reply))
        return reply

    def _outcome(self, value: Any) -> str:
        refusals = [
            one.refusal[0]
            for one in (value if isinstance(value, list) else ())
            if isinstance(one, wire.Answer) and one.refusal is not None and one.refusal[0] != r.AlreadyDone.__name__
        ]
        for name in refusals:
            self._measures.refused(name)
        return "refused" if refusals else "ok"

    async def _raw(self, name: str, raw: Raw, given: Any, timeout_s: float, caller: Caller, size: int) -> Any:
        await self._check(caller, [(shard, raw.needed, f"{name} the log of") for shard in raw.shards(given)])
        _check_numbers(given)
        deadline = self._runtime.deadline(timeout_s)
        call = partial(raw.call, self._consensus, given)
        with self._taken(caller, 1, size):
            loop = asyncio.get_running_loop()
            return raw.shown(await loop.run_in_executor(self._pool, within, deadline, call), caller)

    async def _debts(self, given: Any, timeout_s: float, caller: Caller, size: int) -> Any:
        await self.known(caller)
        call = partial(self.looks.debts, self.looks.ask(), caller, *given)
        deadline = self._runtime.deadline(timeout_s)
        with self._taken(caller, 1, size):
            return await asyncio.get_running_loop().run_in_executor(self.looks.pool, within, deadline, call)

    async def _losing(self, given: Any, _timeout_s: float, caller: Caller, _size: int) -> list[str]:
        """Which clients would lose rights if a table were promoted: for those who could promote it."""
        if self._access is None:
            return []
        await self._check(caller, [(given[0], MAINTAIN, "promote")])
        await self._refresh()
        return sorted({name for pair in self._names.promoted(*given) for name in self._access.losing(*pair)})

    async def _commit(self, given: wire.Commit, timeout_s: float, caller: Caller, size: int) -> list[wire.Answer]:
        proposed = [
            Proposed(shard, wire.decode_command(name, fields), known) for shard, known, name, fields in given.commands
        ]
        needed = [(one.shard, needed_for(one.command, caller.owns), _said(one.command, caller)) for one in proposed]
        await self._check(caller, needed)  # of all of them before the first is taken
        deadline = self._runtime.deadline(timeout_s)
        # Heartbeats are in none of the bounds: who has much to do with a server must not expire for that.
        is_urgent = size <= URGENT_BYTES and {name for _, _, name, _ in given.commands} <= {"Heartbeat"}
        with self._taken(caller, 0 if is_urgent else len(proposed), 0 if is_urgent else size):
            answers = await self._answers(
                ask(self._funnels, proposed, given.token, caller.name, deadline, is_repeated=given.is_repeated)
            )
        return [
            wire.Answer(
                one.seqno, one.is_committed, None if one.refusal is None else wire.encode_refusal(one.refusal),
                one.rows, one.outcome, one.due,
            )
            for one in answers
        ]  # fmt: skip

    async def _answers(self, requests: Sequence[Request]) -> list[Answered]:
        task: Any = asyncio.current_task()
        self._waiting.add(task)
        try:
            return await self._told.of(requests)
        except asyncio.CancelledError:
            if not self._gives_up:  # the client is gone
                raise
            raise Indeterminate(
                f"shard {requests[0].shard}: this server ended before the store answered. It is not known whether the "
                f"command with token {requests[0].token.hex()} was committed; repeat it with the same token",
                shard=requests[0].shard, token=requests[0].token,
            ) from None  # fmt: skip
        finally:
            self._waiting.discard(task)
            for request in requests:
                request.is_dropped = True

    @contextmanager
    def _taken(self, caller: Caller, commands: int, size: int) -> Iterator[None]:
        self.load.take(caller.name, commands, size)
        try:
            yield
        finally:
            self.load.give_back(caller.name, commands, size)


async def _message(context: Any) -> bytes:
    """The message of a call. Raises InvalidUsage if there is none, or it does not arrive in time."""
    try:
        async with asyncio.timeout(RECEIVE_S):
            found = await context.read()
    except TimeoutError as late:
        raise InvalidUsage(f"the message did not arrive within {RECEIVE_S:g} s. Nothing was done") from late
    if not isinstance(found, bytes):
        raise InvalidUsage("the call came without a message. Nothing was done")
    return found


def _said(command: c.Command, caller: Caller) -> str:
    """What a command does, for the error where its sender may not. Of a hold, whose it is counts."""
    kind = type(command).__name__
    if isinstance(command, (c.SetHold, c.DowngradeHold, c.ReleaseHold)) and not caller.owns(command.name):
        return f"{kind} (the hold {shown(command.name)} is not its own) on"
    return f"{kind} on"
