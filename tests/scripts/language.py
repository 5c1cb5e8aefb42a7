"""A small language in which a shard's life is written down, run against the pure core.

A script is prose (`# …`) and steps. A step is command lines, a line `---`, and what they answer, up to a blank line:

    register-writer w1 until=100
    ---
    v2: writer w1 ingest until=100

Ids, keys and frontiers are written short: `w1` is writer w0000000000000001, `w1/2` its part number 2, `[0,10)` bounds,
`*` the empty frontier, `w1/2:3@0-9` a part with 3 updates at times 0 to 9, `inline:3@0-9` the same in the state itself,
`w1/2:3@0-9x500` one of 500 bytes. `0..1` is the batch with ids (0, 1). `tokens` and `opaque` values are plain words.

After each committed command everything that always holds is checked: the invariants of the change and of the state,
and that the row of the log decodes to itself and leads any other process to the very same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, cast

from msgspec.structs import replace

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff, apply_diff
from persist_lib.core.formats import GROUPS
from persist_lib.core.groups import Applied, apply_together
from persist_lib.core.outcomes import find_outcome, is_excluded
from persist_lib.core.pending import PendingName
from persist_lib.core.plan.compaction import plan_compaction
from persist_lib.core.plan.garbage import plan_garbage, plan_orphans
from persist_lib.core.plan.upkeep import plan_expiry
from persist_lib.core.state import Batch, Hold, Outcome, Part, Produced, Rollup, State, Version
from persist_lib.core.trace import CHUNK_BYTES
from persist_lib.core.transitions import change
from persist_lib.core.validate import check_change, check_group, check_state
from persist_lib.errors import InvariantViolated
from persist_lib.format.log import GENESIS, Step, StoredState, decode_row, decode_state, encode_row, encode_state
from persist_lib.format.paths import part_key, rollup_key
from persist_lib.frontier import TOP, Antichain, at
from persist_lib.ids import PUBLISHED, PartKey, ReaderId, SeqNo, WriterId
from persist_lib.schema.schema import Schema
from persist_lib.shard.log import after, apply_row, next_group, next_row
from persist_lib.times import Unit

BYTES_EACH = 100
"""Size of an update in a script's parts."""
MIX = 0x9E3779B97F4A7C15
"""A stand-in for a fingerprint: every update of a script counts this much, unless it says otherwise."""


class Script:
    """One shard's life. `run` takes a command line and answers what came of it."""

    def __init__(self) -> None:
        self.version = Version(SeqNo(0), State(), GENESIS)

    def run(self, line: str) -> str:
        """Answer one line of a script."""
        name, *words = line.split()
        if name == "show":
            return shorten(_shown(self.version.state, words[0]))
        if name == "outcome":
            return shorten(_outcome(self.version.state, Words(words)))
        if name == "produce-many":
            return shorten(self._produce_many(Words(words)))
        if name == "together":
            return shorten(self.commit_together(line.removeprefix("together ").split(" ; ")))
        if name == "plan":
            return shorten(_planned(self.version, words))
        return shorten(self.commit(COMMANDS[name](Words(words))))

    def _produce_many(self, words: Words) -> str:
        """`produce-many w1 999`: an empty append by each of so many producers."""
        writer, count = WriterId(identifier(words.take())), int(words.take())
        for number in range(count):
            lower, upper = self.version.state.upper, at((self.version.state.upper.time or 0) + 1)
            empty = Batch(0, 1, lower, upper, at(0), 0, 0, 0)
            command = c.CompareAndAppend(writer, b"", empty, 0, (f"many-{number}", 0))
            answer = change(self.version.state, SeqNo(self.version.seqno + 1), command)
            assert isinstance(answer, StateDiff), answer
            state = apply_diff(self.version.state, answer)
            self.version = Version(SeqNo(self.version.seqno + 1), state, self.version.digest)
        return f"v{self.version.seqno}: upper {self.version.state.upper}, {len(self.version.state.producers)} producers"

    def commit(self, command: c.Command) -> str:
        """Apply one command, check everything, and tell what changed or why not."""
        seqno = SeqNo(self.version.seqno + 1)
        answer = change(self.version.state, seqno, command)
        if not isinstance(answer, StateDiff):
            return _refused(answer)
        self.version = commit_and_check(self.version, answer, command)
        return f"v{seqno}: " + "\n    ".join(_changes(answer) or ["nothing changed"])

    def commit_together(self, lines: list[str]) -> str:
        """`together set-hold h … ; append …`: apply commands as one row, and tell what each of them got."""
        parsed = [line.split() for line in lines]
        commands = [COMMANDS[name](Words(words)) for name, *words in parsed]
        applied = apply_together(self.version.state, SeqNo(self.version.seqno + 1), commands)
        told = [f"v{self.version.seqno + 1}:" if applied.diffs else "nothing is committed:"]
        for answer in applied.answers:
            assert not isinstance(answer, InvariantViolated), answer
            changes = _changes(answer) or ["nothing changed"] if isinstance(answer, StateDiff) else [_refused(answer)]
            told.append("- " + "\n      ".join(changes))
        if left := len(commands) - len(applied.answers):
            told.append(f"{left} left for the next row")
        if applied.diffs:
            self.version = commit_group_and_check(self.version, commands, applied)
        return "\n    ".join(told)


def commit_group_and_check(version: Version, commands: Sequence[c.Command], applied: Applied) -> Version:
    """The version after several commands, having checked all that must hold of it."""
    seqno, state = SeqNo(version.seqno + 1), applied.state
    check_group(applied.diffs, state, seqno)
    check_state(state, seqno)
    steps = [
        Step(getattr(command, "token", b"token"), c.stored_name(command), "somebody",
             answer if isinstance(answer, StateDiff) else None, "" if isinstance(answer, StateDiff) else repr(answer))
        for command, answer in zip(commands, applied.answers, strict=False)
    ]  # fmt: skip
    if len(applied.diffs) == 1 and state.format < GROUPS:  # what was refused beside it is not in the row
        steps = [step for step in steps if step.diff is not None]
    row = next_group(version, steps, state, 1)
    data = encode_row(row, state.format)
    decoded = decode_row(data, "row")
    assert decoded == row
    assert encode_row(decoded, state.format) == data
    newer = after(row, data, state)
    elsewhere = apply_row(reloaded(version), decoded, "row")
    assert elsewhere == state
    assert rollup_bytes(newer) == encode_state(StoredState(newer.seqno, newer.digest, elsewhere))
    return newer


def commit_and_check(version: Version, diff: StateDiff, command: c.Command) -> Version:
    """The version after `diff`, having checked all that must hold of it."""
    state = apply_diff(version.state, diff)
    seqno = SeqNo(version.seqno + 1)
    check_change(version.state, diff, state, seqno)
    check_state(state, seqno)
    row = next_row(version, diff, state, b"token", c.stored_name(command), 1)
    data = encode_row(row, state.format)
    decoded = decode_row(data, "row")
    assert decoded == row
    assert encode_row(decoded, state.format) == data
    newer = after(row, data, state)
    elsewhere = apply_diff(reloaded(version), decoded.diff)
    assert elsewhere == state
    assert rollup_bytes(newer) == encode_state(StoredState(newer.seqno, newer.digest, elsewhere))
    return newer


def rollup_bytes(version: Version) -> bytes:
    """A version as it is stored."""
    return encode_state(StoredState(version.seqno, version.digest, version.state))


def reloaded(version: Version) -> State:
    """A version's state as another process knows it: decoded, with its mappings in another order."""
    return decode_state(rollup_bytes(version), "rollup").state


class Words:
    """A command's words: `take()` those without `=`, and `get(name)` those with."""

    def __init__(self, words: list[str]) -> None:
        self.plain = [word for word in words if not re.match(r"\w+=", word)]
        self.named = dict(word.split("=", 1) for word in words if re.match(r"\w+=", word))

    def take(self) -> str:
        """The next plain word."""
        return self.plain.pop(0)

    def get(self, name: str, default: str = "") -> str:
        """What is said after `name=`."""
        return self.named.get(name, default)

    def number(self, name: str, default: int = 0) -> int:
        """The number after `name=`."""
        return int(self.named.get(name, default))


def identifier(word: str) -> str:
    """`w1` in full; anything else as it is."""
    return f"{word[0]}{int(word[1:], 16):016x}" if re.fullmatch(r"[wr][0-9a-f]+", word) else word


def frontier(word: str) -> Antichain:
    """`5` or `*`."""
    return TOP if word == "*" else at(int(word))


def key(word: str) -> PartKey:
    """`w1/2`, `^w1/2` (below a publication's folder), `rollup/v3-1`, or the pending batch `~a/0-2x3` of the writer a,
    in full; after `!`, as it is."""
    if match := re.fullmatch(r"~(\w+)/(\d+)-(\d+|\*)x(\d+)(?:\.(\w+))?", word):
        digest = (match[5] or "").rjust(32, "0")
        return PendingName(match[1], int(match[2]), frontier(match[3]), int(match[4]), digest).key
    if word.startswith("^"):
        return PartKey(f"{PUBLISHED}/{key(word[1:])}")
    if word.startswith("!"):
        return PartKey(word[1:])
    owner, _, rest = word.partition("/")
    if owner == "rollup" and (match := re.fullmatch(r"v(\d+)-(\w+)", rest)):
        return rollup_key(SeqNo(int(match[1])), int(match[2], 16))
    return part_key(WriterId(identifier(owner)), int(rest, 16))


def part(word: str, schema: int = 0) -> Part:
    """`w1/2:3@0-9x500`; `w1/2:3@=7` counts at time 7, whatever it holds."""
    at_ = re.search(r"@=(\d+)", word)
    word = re.sub(r"@=(\d+)", r"@\1-\1", word)
    match = re.fullmatch(r"(.+):(\d+)@(\d+)-(\d+)(?:x(\d+))?", word)
    assert match, f"{word!r} is no part"
    is_inline = match[1] == "inline"
    rows = int(match[2])
    size = int(match[5] or rows * BYTES_EACH)
    found = Part(
        PartKey("") if is_inline else key(match[1]), size, rows, bytes(16 * -(-size // CHUNK_BYTES)), b"a", b"z",
        int(match[3]), int(match[4]), schema, bytes(size) if is_inline else None,
    )  # fmt: skip
    return found if at_ is None else found.counted_at(int(at_[1]))


def batch(words: Words) -> Batch:
    """`[0,10) w1/2:3@0-9 …`, with `count= sum= F= since= exact=no runs= schema=` where they are not as expected.

    `F=4` is the fingerprint of four updates.
    """
    bounds = words.take()
    match = re.fullmatch(r"\[(\d+|\*),(\d+|\*)\)", bounds)
    assert match, f"{bounds!r} are no bounds"
    parts = tuple(part(words.take(), words.number("schema")) for _ in range(len(words.plain)))
    count = words.number("count", sum(p.rows for p in parts))
    runs = tuple(map(int, words.get("runs").split(","))) if words.get("runs") else ((0,) if parts else ())
    return Batch(
        0, 1, frontier(match[1]), frontier(match[2]), frontier(words.get("since", "0")), count,
        words.number("sum", count), words.number("F", count) * MIX % 2**64, parts, runs, words.get("exact") != "no",
    )  # fmt: skip


def schema(words: Words) -> Schema:
    """`key=id:int64 value=a:string,b:int64 times=ms`. `!` is not null, `^` counts up."""

    def side(text: str) -> dict[str, str]:
        said = text.replace("!", " not null").replace("^", " identity")
        return dict(column.split(":") for column in said.split(",") if column)

    times = cast("Unit | None", words.get("times") or None)
    return Schema(side(words.get("key", "id:int64")), side(words.get("value")), times=times)


def _ids(text: str) -> tuple[int, int]:
    lo, hi = text.split("..")
    return int(lo), int(hi)


def _append(kind: type[c.CompareAndAppend | c.Append]) -> Callable[[Words], c.Command]:
    def build(words: Words) -> c.Command:
        writer = WriterId(identifier(words.take()))
        token, until, name = words.get("token").encode(), words.number("until"), words.get("producer")
        if kind is c.CompareAndAppend and name:
            return c.CompareAndAppend(writer, token, batch(words), until, (name, words.number("sequence")), 7)
        return kind(writer, token, batch(words), until)

    return build


def _append_now(words: Words) -> c.Command:
    writer, token, until = WriterId(identifier(words.take())), words.get("token").encode(), words.number("until")
    since, now, name = SeqNo(words.number("made")), words.number("now"), words.get("producer")
    producer = (name, words.number("sequence")) if name else None
    return c.AppendNow(writer, token, batch(words), until, since, producer, now)


def _absorb(words: Words) -> c.Command:
    writer, token, until = WriterId(identifier(words.take())), words.get("token").encode(), words.number("until")
    gone = tuple((key(word), 100) for word in words.get("gone").split(",") if word)
    return c.Absorb(writer, token, batch(words), gone, until)


def _clone(words: Words) -> c.Command:
    reader, original = (ReaderId(identifier(words.take())) for _ in range(2))
    return c.CloneReader(reader, original, words.number("until"), words.get("purpose"))


def _compact(words: Words) -> c.Command:
    worker, inputs = WriterId(identifier(words.take())), []
    while (word := words.take()) != "->":
        inputs.append(_ids(word))
    return c.ApplyCompaction(worker, tuple(inputs), batch(words))


def _keep(words: Words) -> c.Command:
    """`keep w1 0..2 [0,20) w1/3:2@19-19 since=19`, or `keep w1 none`."""
    worker, ids = WriterId(identifier(words.take())), words.take()
    if ids == "none":
        return c.KeepContents(worker, None)
    lo, hi = _ids(ids)
    return c.KeepContents(worker, replace(batch(words), lo=lo, hi=hi))


def _pin(words: Words) -> c.Command:
    """`pin delta w1/2 w1/3 expected=x opaque=y as_of=7 keep=5`."""
    expected = None if words.get("expected", "none") == "none" else words.get("expected").encode()
    as_of = int(words.get("as_of")) if words.get("as_of") else None
    name, keys = words.take(), tuple(map(key, words.plain))
    return c.PinKeys(
        name, keys, expected, words.get("opaque").encode(), as_of, words.number("keep"), "follows" in words.named
    )


def _add_rollup(words: Words) -> c.Command:
    worker, blob = WriterId(identifier(words.take())), key(words.take())
    seqno = SeqNo(words.number("at", int(blob.partition("/v")[2].partition("-")[0] or 0)))
    return c.AddRollup(worker, seqno, Rollup(blob, 1000, bytes(16)))


def _hold(kind: type[c.SetHold | c.DowngradeHold], words: Words) -> c.Command:
    expected = None if words.get("expected", "none") == "none" else words.get("expected").encode()
    return kind(words.take(), frontier(words.get("since")), expected, words.get("opaque").encode())


def _downgrade(words: Words) -> c.Command:
    reader, since = ReaderId(identifier(words.take())), frontier(words.get("since", "0"))
    return c.DowngradeSince(reader, since, SeqNo(words.number("seqno")), words.number("until"))


def _inherit(words: Words) -> c.Command:
    """`inherit token=t since=4 hold=audit producer=loader [1,9)`."""
    bounds, since = batch(words), frontier(words.get("since", "0"))
    producers = tuple((name, Produced(7, SeqNo(99), bounds.upper, 1)) for name in words.get("producer").split())
    holds = tuple((name, Hold(since)) for name in words.get("hold").split())
    return c.Inherit(words.get("token").encode(), bounds.lower, bounds.upper, since, holds, producers)


def _writer_purpose(words: Words) -> c.Command:
    writer = WriterId(identifier(words.take()))
    purpose: Literal["ingest", "maintenance"] = "maintenance" if "maintenance" in words.plain else "ingest"
    return c.RegisterWriter(writer, purpose, words.number("until"), "", words.get("layer"))


COMMANDS: dict[str, Callable[[Words], c.Command]] = {
    "create": lambda w: c.Create(schema(w), w.number("format", 1)),
    "register-writer": _writer_purpose,
    "register-reader": lambda w: c.RegisterReader(ReaderId(identifier(w.take())), w.number("until"), w.get("purpose")),
    "compare-and-append": _append(c.CompareAndAppend),
    "append-now": _append_now,
    "append": _append(c.Append),
    "absorb": _absorb,
    "discard": lambda w: c.DiscardPending(tuple((key(word), 100) for word in w.plain)),
    "clone-reader": _clone,
    "heartbeat": lambda w: c.Heartbeat(tuple(map(identifier, w.plain)), w.number("until")),
    "downgrade-since": _downgrade,
    "set-hold": partial(_hold, c.SetHold),
    "downgrade-hold": partial(_hold, c.DowngradeHold),
    "release-hold": lambda w: c.ReleaseHold(w.take(), w.get("expected").encode()),
    "forget-producer": lambda w: c.ForgetProducer(w.take(), w.number("expected")),
    "reserve": lambda w: c.Reserve(w.take(), w.number("first"), w.number("count")),
    "set-retention": lambda w: c.SetRetention(None if w.plain == ["none"] else int(w.take()), w.get("layer")),
    "expire": lambda w: c.Expire(w.number("now")),
    "retire": lambda w: c.Retire(identifier(w.take())),
    "compact": _compact,
    "keep": _keep,
    "pin": _pin,
    "unpin": lambda w: c.Unpin(w.take(), w.get("expected").encode()),
    "add-rollup": _add_rollup,
    "forget-garbage": lambda w: c.ForgetGarbage(tuple(map(key, w.plain))),
    "forget-retired": lambda w: c.ForgetRetired(tuple(map(identifier, w.plain))),
    "evolve-schema": lambda w: c.EvolveSchema(w.number("expected"), schema(w)),
    "upgrade": lambda w: c.Upgrade(w.number("format")),
    "finish": lambda _: c.Finish(),
    "inherit": _inherit,
    "adopt": lambda w: c.Adopt(w.take(), SeqNo(w.number("at"))),
}


def shorten(text: str) -> str:
    """Ids and keys as scripts write them."""
    text = re.sub(r"-pending/(\w+)/(\d+)-(\d+|top)-(\d+)-0*(\w*)\.parquet", _short_name, text)
    text = text.replace(f"{PUBLISHED}/", "^")
    text = re.sub(r"rollup/v0*(\d+)-0*([0-9a-f]+)", r"rollup/v\1-\2", text)
    text = re.sub(r"/0{8,}([0-9a-f]*)\.parquet", lambda m: f"/{m[1] or 0}", text)
    return re.sub(r"\b([wr])0{8,}([0-9a-f]*)", lambda m: f"{m[1]}{m[2] or 0}", text)


def _short_name(match: re.Match[str]) -> str:
    upper = "*" if match[3] == "top" else str(int(match[3]))
    return f"~{match[1]}/{int(match[2])}-{upper}x{match[4]}{'.' if match[5] else ''}{match[5]}"


def _refused(refusal: r.Refusal) -> str:
    fields = " ".join(f"{name}={_plain(getattr(refusal, name))}" for name in refusal.__struct_fields__)
    return f"refused: {type(refusal).__name__} {fields}".rstrip()


def _plain(value: object) -> str:
    if isinstance(value, tuple) and value:
        return ",".join(_plain(item) for item in value)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Outcome):
        return f"{value.token.decode()}@v{value.seqno}"
    if isinstance(value, Produced):
        return f"{value.sequence}@v{value.seqno} to {value.upper}"
    return str(value) if isinstance(value, (str, Antichain)) else repr(value)


def _bounds(batch: Batch) -> str:
    sides = ["*" if side.time is None else str(side.time) for side in (batch.lower, batch.upper, batch.since)]
    return f"[{sides[0]},{sides[1]}) since {sides[2]}"


def _batch(batch: Batch) -> str:
    parts = " ".join(f"{p.key or 'inline'}:{p.rows}@{_times(p)}" for p in batch.parts)
    exact = "" if batch.exact else " (filtered)"
    runs = f" in {len(batch.runs)} runs" if len(batch.runs) > 1 else ""
    return f"batch {batch.lo}..{batch.hi} {_bounds(batch)}, {batch.count} updates{exact}{runs} {parts}".rstrip()


def _times(part: Part) -> str:
    return f"{part.time_lower}-{part.time_upper}" if part.at is None else f"={part.at}"


def _entry(value: object) -> str:
    """A writer, reader, hold, rollup or garbage entry, without what is the same everywhere."""
    if value is None:
        return "gone"
    if isinstance(value, int):
        return f"v{value}"
    hidden = {"digests", "size", "key"} if hasattr(value, "key") else set()
    fields = [(n, getattr(value, n)) for n in value.__struct_fields__ if n not in hidden]  # type: ignore[attr-defined]
    shown = (f"{name}={_plain(got)}" for name, got in fields if got not in ((), ""))
    return " ".join(shown) or str(getattr(value, "key", ""))


def _changes(diff: StateDiff) -> list[str]:
    lines = []
    if diff.since is not None:
        lines.append(f"since {diff.since[0]} -> {diff.since[1]}")
    if diff.trace is not None:
        lines += [f"- batch {lo}..{hi}" for lo, hi in diff.trace.removed]
        lines += [f"+ {_batch(added)}" for added in diff.trace.added]
    if diff.contents is not None:
        lines += [f"{sign} contents {_batch(one)}" for sign, one in zip("-+", diff.contents, strict=True) if one]
    lines += [f"+ schema {added}" for added in diff.schemas]
    if diff.format is not None:
        lines.append(f"format {diff.format[0]} -> {diff.format[1]}")
    if diff.member is not None:
        lines.append(f"member of {diff.member[1]}")
    if diff.outcomes is not None:
        kept = " ".join(f"{_plain(outcome)} to {outcome.upper}" for outcome in diff.outcomes.added)
        lines.append(f"remembers {kept}")
    if diff.retention is not None:
        lines.append(f"retention {diff.retention[0]} -> {diff.retention[1]}")
    for name in ("writers", "readers", "holds", "retired", "garbage", "rollups", "producers", "pins"):
        lines += [f"{name.removesuffix('s')} {k}: {_entry(new)}" for k, _, new in getattr(diff, name)]
    lines += [f"next number of {column}: {old or 1} -> {new}" for column, old, new in diff.identities]
    return lines


def _shown(state: State, what: str) -> str:
    if what == "trace":
        ahead = [] if state.contents is None else [f"ahead: {_batch(state.contents)}"]
        return "\n".join([*map(_batch, state.trace), *ahead]) or "empty"
    if what == "totals":
        digest = state.fingerprint * pow(MIX, -1, 2**64) % 2**64
        return (
            f"since {state.since} upper {state.upper} {state.count} updates {state.size} bytes "
            f"{state.inline_size} inline, fingerprint {digest} x MIX"
        )
    if what == "schemas":
        return "\n".join(f"{number}: {found}" for number, found in enumerate(state.schemas))
    if what == "outcomes":
        return "\n".join(f"{_plain(outcome)} to {outcome.upper}" for outcome in state.outcomes) or "none"
    if what == "finished":
        return str(state.is_finished())
    entries = getattr(state, what)
    return "\n".join(f"{k}: {_entry(entries[k])}" for k in sorted(entries)) or "none"


def _outcome(state: State, words: Words) -> str:
    """`outcome token=a [0,10)`: what the state knows of that append."""
    match = re.fullmatch(r"\[(\d+|\*),(\d+|\*)\)", words.take())
    assert match
    lower, upper = frontier(match[1]), frontier(match[2])
    found = find_outcome(state, words.get("token").encode(), lower, upper)
    if found is not None:
        return f"committed at v{found.seqno}"
    return "never" if is_excluded(state, lower, upper) else "unknown"


def _planned(version: Version, words: list[str]) -> str:
    state, what = version.state, words[0]
    if what == "compaction":
        plan = plan_compaction(state)
        lines = [f"{r.reason} {' '.join(f'{lo}..{hi}' for lo, hi in r.ids)} as of {r.since}" for r in plan.requests]
        return "\n".join([*lines, *(f"leave {s.ids[0][0]}..{s.ids[0][1]}: {s.why}" for s in plan.skipped)]) or "nothing"
    if what == "collection":
        found = plan_garbage(state, version.seqno)
        lines = [f"delete {k}" for k in sorted(found.keys)] + [f"keep {held.keys}: {held.why}" for held in found.held]
        return "\n".join([*lines, f"truncate below v{found.truncate_below}"])
    if what == "expiry":
        overdue = plan_expiry(state, int(words[1].removeprefix("now=")))
        return "\n".join(f"{o.id} since {o.overdue_ms} ms" for o in overdue) or "nothing"
    orphans = plan_orphans(state, [(key(word), BYTES_EACH) for word in words[1:]])
    lines = [f"orphan {k}" for k in sorted(orphans.keys)] + [f"swept {id_}" for id_ in orphans.swept]
    return "\n".join([*lines, f"{orphans.live} live, {orphans.pending} pending"])


def rewrite(text: str) -> str:
    """A script with what its commands answer now."""
    script, out = Script(), []
    for block in text.strip("\n").split("\n\n"):
        lines = [line for line in block.split("\n---\n")[0].splitlines() if line != "---"]
        steps = [line for line in lines if line and not line.startswith("#")]
        answers = [answer for step in steps for answer in [script.run(step)]]
        out.append("\n".join([*lines, *(["---", *answers] if steps else [])]))
    return "\n\n".join(out) + "\n"
