"""What each command does to a state, as a table: for each command the refusals first, then the one effect.

Pure and total: no I/O, no clock, no randomness. `seqno` is where in the log the transition would be committed.
"""

from __future__ import annotations

from typing import Literal, assert_never

import msgspec

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.contents import is_across, is_replaced, keep_contents
from persist_lib.core.diff import OutcomesEdit, StateDiff, TraceEdit, apply_diff, find_slice
from persist_lib.core.formats import (
    CLUSTERS,
    FIRST,
    NEWEST,
    OWNERS,
    PARTS_SAY,
    PENDING_AREA,
    REMEMBERS_OUTCOMES,
    least_for,
    least_for_batches,
    least_to_follow,
)
from persist_lib.core.holds import layer_of, refuses_writer, release_hold, set_hold, set_retention
from persist_lib.core.identities import reserve
from persist_lib.core.leases import expire, extend, fold_since, moved_mark, needed_by, retire
from persist_lib.core.members import adopt, inherit, refuses_stranger
from persist_lib.core.outcomes import (
    cannot_produce,
    find_outcome,
    forget_producer,
    is_not_new,
    not_new,
    placed,
    produced,
    remember,
    staged_before,
)
from persist_lib.core.pending import absorbed_garbage, absorption_problem, clone, discard
from persist_lib.core.pins import by_name, pin_keys, pinned, unpin
from persist_lib.core.state import (
    INLINE_TOTAL_BYTES,
    TOKENS_KEPT,
    Batch,
    Garbage,
    Outcome,
    Reader,
    State,
    Writer,
)
from persist_lib.core.sums import total
from persist_lib.core.trace import batch_problems, cannot_link, dead_uploaders, freed, known_keys, push
from persist_lib.errors import SchemaMismatch
from persist_lib.frontier import MINIMUM, TOP, Antichain
from persist_lib.ids import READER, WRITER, PartKey, SeqNo, WriterId, is_pending, parse_rollup_key
from persist_lib.schema.evolution import is_prefix
from persist_lib.schema.schema import check_schema, no_key


def apply(state: State, seqno: SeqNo, command: c.Command) -> State | r.Refusal:
    """The state after `command`, or why it does not apply."""
    answer = change(state, seqno, command)
    return apply_diff(state, answer) if isinstance(answer, StateDiff) else answer


def change(state: State, seqno: SeqNo, command: c.Command) -> StateDiff | r.Refusal:
    """What `command` changes in `state` when committed at `seqno`, or why it does not apply."""
    match command:
        case c.Create() if state.schemas:
            return r.Exists("shard")
        case c.Create(_, format_) if not FIRST <= format_ <= NEWEST:
            return r.Malformed(f"format {format_}")
        case c.Create(schema, format_) if format_ < (least := least_for(schema)):
            return r.Malformed(f"a schema that needs format {least} ({schema}) in format {format_}")
        case c.Create(schema) if (reason := no_key(schema)) is not None:
            return r.Malformed(f"such a key ({reason})")
        case c.Create(schema, format_):
            return _with_format(State(), seqno, format_, StateDiff(schemas=(schema,)))
        case _ if not state.schemas:
            return r.Unknown(("shard",))
        case c.ForgetGarbage(keys):
            return _forget_garbage(state, keys)
        case c.ForgetRetired(ids):
            return _forget_retired(state, ids)
        case c.AddRollup():
            return _add_rollup(state, seqno, command)
        case c.CompareAndAppend() | c.Append() | c.Absorb() if outcome := _remembered(state, command):
            return r.AlreadyDone(outcome)
        case c.AppendNow() if refusal := not_new(state, seqno, command):
            return refusal
        case c.CompareAndAppend(producer=(name, sequence)) | c.AppendNow(producer=(name, sequence)) if (
            refusal := is_not_new(state, name, sequence)
        ):
            return refusal
        case _ if state.is_finished():
            return r.Finished()
        case _ if state.member and (refusal := refuses_stranger(state, command)):
            return refusal
        case c.Adopt():
            return adopt(state, seqno, command)
        case c.Inherit():
            return inherit(state, seqno, command)
        case c.RegisterWriter(writer) if not WRITER.fullmatch(writer):
            return r.Malformed(f"writer id {writer!r}")
        case c.RegisterWriter(writer) if writer in state.writers or writer in state.retired:
            return r.Exists(writer)
        case c.RegisterWriter() if refusal := refuses_writer(state, command):
            return refusal
        case c.RegisterWriter(at=at) if at is not msgspec.UNSET and at != seqno:
            return r.Overtaken(at, seqno)
        case c.RegisterWriter(writer, purpose, lease_until, owner):
            return StateDiff(writers=((writer, None, _writer(state, purpose, lease_until, owner)),))
        case c.RegisterReader(reader) if not READER.fullmatch(reader):
            return r.Malformed(f"reader id {reader!r}")
        case c.RegisterReader(reader) if reader in state.readers or reader in state.retired:
            return r.Exists(reader)
        case c.RegisterReader(reader, lease_until, purpose):
            return StateDiff(readers=((reader, None, Reader(state.since, seqno, lease_until, purpose)),))
        case c.CloneReader():
            return clone(state, command)
        case c.CompareAndAppend() | c.Append() | c.Absorb():
            return _append(state, seqno, command)
        case c.AppendNow():
            append = placed(state, command)
            return _append(state, seqno, append) if isinstance(append, c.CompareAndAppend) else append
        case c.DiscardPending():
            return discard(state, seqno, command)
        case c.Heartbeat(ids, lease_until):
            return extend(state, ids, lease_until)
        case c.DowngradeSince(reader) if reader not in state.readers:
            return r.NotLive((reader,))
        case c.DowngradeSince():
            return _downgrade_since(state, seqno, command)
        case c.SetHold() | c.DowngradeHold():
            return set_hold(state, command)
        case c.ReleaseHold():
            return release_hold(state, command)
        case c.ForgetProducer(name, expected):
            return forget_producer(state, name, expected)
        case c.Reserve():
            return reserve(state, command)
        case c.SetRetention():
            return set_retention(state, command)
        case c.Expire(now):
            return expire(state, seqno, now)
        case c.Retire(id_):
            return retire(state, seqno, (id_,)) or r.NotLive((id_,))
        case c.ApplyCompaction():
            return _apply_compaction(state, seqno, command)
        case c.KeepContents():
            return keep_contents(state, seqno, command)
        case c.PinKeys():
            return pin_keys(state, command)
        case c.Unpin():
            return unpin(state, command)
        case c.EvolveSchema(expected, schema):
            return _evolve_schema(state, expected, schema)
        case c.Upgrade(format_):
            return _upgrade(state, seqno, format_)
        case c.Finish():
            return _finish(state, seqno)
        case _:
            assert_never(command)


def _writer(state: State, purpose: Literal["ingest", "maintenance"], lease_until: int, owner: str) -> Writer:
    """A fresh writer, with its owner if the format has one."""
    return Writer(purpose, lease_until, owner=owner if state.format >= OWNERS else "")


def _append(state: State, seqno: SeqNo, command: c.CompareAndAppend | c.Append | c.Absorb) -> StateDiff | r.Refusal:
    writer, batch = state.writers.get(command.writer), command.batch
    if writer is None:
        return r.NotLive((command.writer,))
    keys = batch.keys
    if isinstance(command, c.Absorb):
        if state.format < PENDING_AREA:
            return r.NeedsFormat("a pending area", PENDING_AREA, state.format)
        if reason := absorption_problem(command):
            return r.InvalidBounds(reason)
        uploaded = tuple(key for key in keys if not is_pending(key))
    else:
        uploaded = keys
    if strangers := dead_uploaders(state, uploaded):
        return r.NotLive(strangers)
    if problems := batch_problems(batch, state) or (batch.since != MINIMUM and ["an appended batch has a since"]):
        return r.InvalidBounds("; ".join(problems))
    if (least := least_for_batches((batch,))) > state.format:
        return r.NeedsFormat(PARTS_SAY[least], least, state.format)
    producer = command.producer if isinstance(command, c.CompareAndAppend) else None
    if producer is not None and (refusal := cannot_produce(state, producer[0])):
        return refusal
    if isinstance(command, c.Append) and batch.upper <= state.upper:
        # Upper is also past everything when another writer closed the shard before all data was in.
        return r.WrongUpper(batch.lower, TOP) if state.upper.is_top() and batch.count else r.AlreadyDone()
    if isinstance(command, c.Append) and batch.lower < state.upper and _lies_beyond(batch, state.upper):
        batch = msgspec.structs.replace(batch, lower=state.upper)
    if batch.lower != state.upper:
        return r.WrongUpper(batch.lower, state.upper)
    garbage = absorbed_garbage(command, seqno) if isinstance(command, c.Absorb) else ()
    if known := known_keys(state, (*keys, *(key for key, *_ in garbage))):
        return r.Exists(known[0])
    staged = _staged(command)
    if strangers := tuple(sorted({id_ for id_, _ in staged} - state.writers.keys())):
        return r.NotLive(strangers)
    if before := staged_before(state, staged):
        return r.Exists(f"{r.STAGED}{before[0].token.hex()}")
    if state.inline_size + batch.inline_size > INLINE_TOTAL_BYTES:
        return r.InlineFull(state.inline_size)
    outcome = Outcome(command.token, seqno, batch.upper)
    remembered = remember(state, outcome)
    # From format 2 on the shard remembers the outcomes of all writers. A writer keeps only its last one, which tells
    # the other processes that it contends.
    outcomes = (*writer.outcomes, outcome)[-TOKENS_KEPT:] if remembered is None else (outcome,)
    renewed = msgspec.structs.replace(
        writer, lease_until=max(writer.lease_until, command.lease_until), outcomes=outcomes
    )
    return StateDiff(
        trace=push(state, batch, seqno),
        writers=_remembering(state, command.writer, renewed, staged, outcome),
        garbage=garbage,
        outcomes=remembered,
        producers=(produced(state, command, command.producer, seqno),)
        if isinstance(command, c.CompareAndAppend) and command.producer is not None
        else (),
    )


def _staged(command: c.CompareAndAppend | c.Append | c.Absorb) -> c.Staged:
    return (command.staged or ()) if isinstance(command, c.CompareAndAppend) else ()


def _remembering(
    state: State, id_: WriterId, renewed: Writer, staged: c.Staged, outcome: Outcome
) -> tuple[tuple[WriterId, Writer | None, Writer | None], ...]:
    """The writer of an append as it is after it; and each stage of the answers in it, which remembers them."""
    after = {id_: renewed}
    if state.format >= OWNERS:
        for stage, answer in staged:
            known = after.get(stage, state.writers[stage])
            one = msgspec.structs.replace(outcome, token=answer)
            after[stage] = msgspec.structs.replace(known, staged=(*known.staged, one))
    return tuple((stage, state.writers[stage], one) for stage, one in after.items())


def _remembered(state: State, command: c.CompareAndAppend | c.Append | c.Absorb) -> Outcome | None:
    """The outcome of this append, if it was committed before. An append that starts at upper cannot have been."""
    batch = command.batch
    if batch.lower == state.upper:
        return None
    # Of an Append, only the part beyond upper was registered, so it began where upper was then.
    lower = batch.upper if isinstance(command, c.Append) else batch.lower
    return find_outcome(state, command.token, lower, batch.upper)


def _upgrade(state: State, seqno: SeqNo, format_: int) -> StateDiff | r.Refusal:
    if not FIRST <= format_ <= NEWEST:
        return r.Malformed(f"format {format_}")
    if format_ < state.format:
        return r.OlderFormat(format_, state.format)
    if format_ == state.format:
        return r.AlreadyDone()
    return _with_format(state, seqno, format_, StateDiff())


def _with_format(state: State, seqno: SeqNo, format_: int, diff: StateDiff) -> StateDiff:
    """`diff`, with the change to this format, and with the first values of what that format adds."""
    if format_ == state.format:
        return diff
    is_first = state.format < REMEMBERS_OUTCOMES <= format_
    # A mark says that outcomes before it are not known.
    mark = OutcomesEdit(0, (Outcome(b"", seqno, state.upper),)) if is_first else None
    return msgspec.structs.replace(diff, format=(state.format, format_), outcomes=mark)


def _lies_beyond(batch: Batch, upper: Antichain) -> bool:
    """Whether all updates of the batch are at or beyond `upper`. Registering it from there on then changes no sum.

    Otherwise only the caller has the data to compute what remains. WrongUpper tells it where to cut.
    """
    return all(upper.is_before(part.time_lower) for part in batch.parts)


def _downgrade_since(state: State, seqno: SeqNo, command: c.DowngradeSince) -> StateDiff | r.Refusal:
    old = state.readers[command.reader]
    new = Reader(
        since=old.since.join(command.since),
        seqno=max(old.seqno, min(command.seqno, seqno)),
        lease_until=max(old.lease_until, command.lease_until),
        purpose=old.purpose,
    )
    since = fold_since(state, readers={**state.readers, command.reader: new})
    if new == old and since is None:
        return r.AlreadyDone()
    return StateDiff(since=since, readers=((command.reader, old, new),), holds=moved_mark(state, since))


def _apply_compaction(state: State, seqno: SeqNo, command: c.ApplyCompaction) -> StateDiff | r.Refusal:
    inputs, output = command.inputs, command.output
    if command.worker not in state.writers:
        return r.NotLive((command.worker,))
    start = find_slice(state.trace, inputs) if inputs else None
    if start is None:
        return r.InputsGone(inputs)
    gone = state.trace[start : start + len(inputs)]
    if is_across(state, gone):
        return r.InputsGone(inputs)
    placed = msgspec.structs.replace(output, lo=gone[0].lo, hi=gone[-1].hi, born=seqno)
    ahead = state.contents if is_replaced(state, placed) else None
    replaced = gone if ahead is None else (*gone, ahead)
    held = {part.key: part for batch in replaced for part in batch.parts if part.inline is None}
    if strangers := dead_uploaders(state, (key for key in output.keys if key not in held)):
        return r.NotLive(strangers)
    if (least := least_for_batches((output,))) > state.format:
        return r.NeedsFormat(PARTS_SAY[least], least, state.format)
    if reason := _not_equivalent(state, gone, output):
        return r.NotEquivalent(reason)
    if refusal := cannot_link(state, output, held):
        return refusal
    if state.inline_size + output.inline_size - sum(b.inline_size for b in gone) > INLINE_TOTAL_BYTES:
        return r.InlineFull(state.inline_size)
    return StateDiff(
        trace=TraceEdit(inputs, (placed,)),
        garbage=freed(held, output.keys, seqno),
        contents=None if ahead is None else (ahead, None),
    )


def _not_equivalent(state: State, gone: tuple[Batch, ...], output: Batch) -> str | None:
    """Why `output` does not stand for the batches `gone`; None when it does."""
    if problems := batch_problems(output, state):
        return "; ".join(problems)
    if (output.lower, output.upper) != (gone[0].lower, gone[-1].upper):
        return f"bounds [{output.lower}, {output.upper}) are not [{gone[0].lower}, {gone[-1].upper})"
    if output.since > state.since:
        return f"since {output.since} is beyond the shard's {state.since}"
    if any(output.since < batch.since for batch in gone):
        return f"since {output.since} is behind an input's"
    expected = total(batch.sums for batch in gone)
    if output.count > expected.count:
        return f"{output.count} updates are more than the inputs' {expected.count}"
    if output.fingerprint != expected.fingerprint:
        return f"fingerprint is {output.fingerprint}, the inputs' is {expected.fingerprint}"
    if output.diff_sum != expected.diff_sum:
        return f"diff_sum is {output.diff_sum}, the inputs' is {expected.diff_sum}"
    if len(gone) == 1 and not _gains(gone[0], output, state.format):
        return "it gains nothing over the one batch that it replaces"
    return None


def _gains(old: Batch, new: Batch, format_: int) -> bool:
    """Whether `new` is better than `old` in something, and worse in nothing; or it has more runs as of a later since.

    SUBTLE: a batch that is rewritten alone keeps its id, so its id does not tell its old form from the new one. If any
    rewriting were allowed, a result that was committed, replaced and collected could be committed once more, and would
    refer to objects that are gone. As each rewriting has to gain, no earlier form of a batch ever comes back: where its
    since grows, which never goes back, it may have more runs (`core.plan.clusters`).
    """
    most = len(new.runs) if format_ >= CLUSTERS and old.since < new.since else 0
    was = (old.since, not old.exact, max(most, len(old.runs)), old.inline_size, old.count)
    is_ = (new.since, not new.exact, len(new.runs), new.inline_size, new.count)
    return was[0] <= is_[0] and all(now <= before for before, now in zip(was[1:], is_[1:], strict=True)) and was != is_


def _add_rollup(state: State, seqno: SeqNo, command: c.AddRollup) -> StateDiff | r.Refusal:
    # A tombstone has no live writers, and needs its one rollup all the same.
    if command.worker not in state.writers and not state.is_finished():
        return r.NotLive((command.worker,))
    newest = state.newest_rollup
    if command.seqno <= newest:
        return r.TooOld(command.seqno, newest)
    if parse_rollup_key(command.rollup.key) != command.seqno:
        return r.Malformed(f"key {command.rollup.key!r} for a rollup of v{command.seqno}")
    if command.rollup.key in state.garbage:
        return r.Exists(command.rollup.key)
    if command.seqno >= seqno:
        return r.InvalidBounds(f"a rollup of seqno {command.seqno} cannot be linked at {seqno}")
    keep = {newest} if not state.is_finished() else set()
    old = [(at, rollup) for at, rollup in sorted(state.rollups.items()) if at not in keep]
    return StateDiff(
        rollups=(*((at, rollup, None) for at, rollup in old), (command.seqno, None, command.rollup)),
        garbage=tuple((rollup.key, None, Garbage(seqno, rollup.size)) for _, rollup in old),
    )


def _forget_garbage(state: State, keys: tuple[PartKey, ...]) -> StateDiff | r.Refusal:
    keys = tuple(dict.fromkeys(keys))
    if not keys or any(key not in state.garbage for key in keys):
        return r.Unknown(tuple(key for key in keys if key not in state.garbage))
    if held := sorted({name for key, names in pinned(state).items() if key in keys for name in names}):
        return r.Held(tuple(f"pin {name}" for name in held))
    return StateDiff(garbage=tuple((key, state.garbage[key], None) for key in keys))


def _forget_retired(state: State, ids: tuple[str, ...]) -> StateDiff | r.Refusal:
    ids = tuple(dict.fromkeys(ids))
    if not ids or any(id_ not in state.retired for id_ in ids):
        return r.Unknown(tuple(id_ for id_ in ids if id_ not in state.retired))
    return StateDiff(retired=tuple((id_, state.retired[id_], None) for id_ in ids))


def _evolve_schema(state: State, expected: int, schema: object) -> StateDiff | r.Refusal:
    newest = len(state.schemas) - 1
    if schema == state.schemas[newest]:
        return r.AlreadyDone()
    if expected != newest:
        return r.WrongSchema(newest, f"the newest schema is number {newest}, not {expected}")
    older, newer = state.schemas[newest], check_schema(schema)
    try:
        older.check_additive(newer)
    except SchemaMismatch as mismatch:
        return r.WrongSchema(newest, mismatch.message)
    if (least := least_to_follow(older, newer)) > state.format:
        return r.Malformed(f"a schema that needs format {least} ({newer}) in format {state.format}")
    if not is_prefix(older, newer) and (reason := _only_gains(state)):
        return r.WrongSchema(newest, f"{reason}: it only gains columns that may be null and have no default")
    return StateDiff(schemas=(newer,))


def _only_gains(state: State) -> str:
    """Why columns cannot be renamed, widened, dropped or reordered, nor have defaults; empty if they can."""
    if found := by_name(state):
        return f"the shard is published as {' and '.join(found)}"
    layer = layer_of(state)
    return f"the shard is one of {layer}" if layer not in {"", "collection"} else ""


def _finish(state: State, seqno: SeqNo) -> StateDiff | r.Refusal:
    if by := needed_by(state):
        return r.Held(by)
    parts = {part.key: part for batch in state.stored for part in batch.parts if part.inline is None}
    old = [(at, rollup) for at, rollup in sorted(state.rollups.items()) if at != state.newest_rollup]
    empty = Batch(0, state.next_id + 1, MINIMUM, TOP, MINIMUM, 0, 0, 0, born=seqno)
    gone = retire(state, seqno, tuple(sorted(state.writers)))
    return StateDiff(
        since=(state.since, TOP),
        trace=TraceEdit(tuple(batch.id for batch in state.trace), (empty,)),
        writers=gone.writers if gone else (),
        retired=gone.retired if gone else (),
        rollups=tuple((at, rollup, None) for at, rollup in old),
        contents=None if state.contents is None else (state.contents, None),
        garbage=(
            *freed(parts, (), seqno),
            *((rollup.key, None, Garbage(seqno, rollup.size)) for _, rollup in old),
        ),
        retention=(state.retention, None) if state.retention is not None else None,
        holds=tuple((name, hold, None) for name, hold in state.holds.items()),
    )
