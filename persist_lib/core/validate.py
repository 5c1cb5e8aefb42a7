"""What always holds of a state, as code. Checked in whole after each load, and for each change before it is committed.

`check_state(state, seqno)` and `check_change(old, diff, new, seqno)` raise InvariantViolated with one sentence for each
broken invariant. Neither is ever compiled out; a client never commits on top of a state that fails. A client that
follows a log written by others calls `check_references` as well, and then refuses whatever `check_state` refuses.
`history_problems` is for those who verify: what always holds from one version to the next, beyond that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from persist_lib.core.contents import changed_contents
from persist_lib.core.contents import problems as contents_problems
from persist_lib.core.diff import StateDiff
from persist_lib.core.formats import (
    FIRST,
    GROUPS,
    NEWEST,
    PRODUCERS,
    REMEMBERS_OUTCOMES,
    least_for_batches,
    least_for_state,
    least_for_writers,
)
from persist_lib.core.identities import problems as identity_problems
from persist_lib.core.outcomes import problems_of
from persist_lib.core.pending import parse_pending_key
from persist_lib.core.pins import changed_pins
from persist_lib.core.pins import problems as pin_problems
from persist_lib.core.state import (
    COUNTS_BYTES,
    INLINE_TOTAL_BYTES,
    OUTCOMES_KEPT,
    PRODUCERS_MOST,
    Batch,
    Outcome,
    Produced,
    State,
)
from persist_lib.core.sums import MODULUS
from persist_lib.core.trace import batch_problems
from persist_lib.errors import InvariantViolated, SchemaMismatch
from persist_lib.frontier import MINIMUM
from persist_lib.ids import READER, WRITER, PartKey, SeqNo, parse_rollup_key, uploader_of
from persist_lib.schema.schema import no_key


def check_state(state: State, seqno: SeqNo) -> None:
    """Raise InvariantViolated unless all state-local invariants hold."""
    found = _schemas(state) + _trace(state) + _totals(state) + _keys(state) + _outcomes(state, state.outcomes, seqno)
    found += _producers(state, state.producers.items(), seqno) + _says_too_much(state) + contents_problems(state)
    found += identity_problems(state)
    found += pin_problems(state)
    _refuse(found + _rollups(state, seqno) + _ids(state, seqno), seqno)


def check_change(old: State, diff: StateDiff, new: State, seqno: SeqNo) -> None:
    """Raise InvariantViolated unless `new` keeps the invariants that `diff` could break. Costs O(change)."""
    found = changed_contents(diff, new) if diff.contents is not None or new.contents is not None else []
    if diff.pins or new.pins:
        found += changed_pins(diff, new)
    if new.since < old.since or new.upper < old.upper:
        found.append(f"since or upper went back: {old.since}, {old.upper} -> {new.since}, {new.upper}")
    if diff.trace is not None:
        found += _trace_change(new, diff)
    if diff.schemas or not new.schemas:
        found += _schemas(new)
    if diff.schemas or diff.format is not None or diff.member is not None or diff.pins:
        found += _says_too_much(new)
    if diff.rollups:
        found += _rollups(new, seqno)
    found += _outcomes(new, new.outcomes[-2:], seqno)
    if new.inline_size > INLINE_TOTAL_BYTES:
        found.append(f"{new.inline_size} inline bytes")
    if diff.readers or diff.holds or diff.since is not None:
        found += _holders(new)
    if diff.writers or diff.readers:
        found += _changed_ids(old, diff, new, seqno)
    if diff.producers or len(new.producers) > PRODUCERS_MOST:
        found += _producers(new, [(name, after) for name, _, after in diff.producers if after is not None], seqno)
    found += _later(diff, new, seqno) + _numbers(diff, new)
    if diff.garbage:
        found += [f"{key} became garbage twice" for key, was, _ in diff.garbage if was is None and key in old.garbage]
    _refuse(found, seqno)


def _numbers(diff: StateDiff, new: State) -> list[str]:
    is_concerned = diff.identities or (new.identities and (diff.schemas or diff.format is not None))
    return identity_problems(new) if is_concerned else []


def _changed_ids(old: State, diff: StateDiff, new: State, seqno: SeqNo) -> list[str]:
    found = []
    for id_, before, after in (*diff.writers, *diff.readers):
        if before is None and id_ in old.retired:
            found.append(f"{id_} came back from the retired")
        if after is not None and id_ in new.retired:
            found.append(f"{id_} is both live and retired")
    for id_, _, writer in diff.writers:
        if (least := least_for_writers((writer,))) > new.format:
            found.append(f"a writer says what only format {least} can, in format {new.format}")
        if not WRITER.fullmatch(id_):
            found.append(f"writer id {id_!r} is malformed")
    for id_, _, reader in diff.readers:
        if not READER.fullmatch(id_):
            found.append(f"reader id {id_!r} is malformed")
        if reader is not None and reader.seqno > seqno:
            found.append(f"{id_} holds a state beyond v{seqno}")
    return found


def check_group(diffs: Sequence[StateDiff], new: State, seqno: SeqNo) -> None:
    """Raise InvariantViolated unless `diffs`, each of which was checked by itself, may be one row that led to `new`.

    A state remembers each append of the row that led to it. Otherwise nobody could tell what became of some of them.
    """
    if len(diffs) == 1:
        return
    added = [outcome for diff in diffs if diff.outcomes is not None for outcome in diff.outcomes.added]
    found = [f"a group of {len(diffs)} changes in format {new.format}"] if new.format < GROUPS else []
    if added and new.outcomes[-len(added) :] != tuple(added):
        found.append(f"only {len(new.outcomes)} of the {len(added)} appends of one row are remembered")
    _refuse(found, seqno)


def check_references(state: State, diffs: Iterable[StateDiff], seqno: SeqNo) -> None:
    """Raise InvariantViolated if what `diffs` linked or made garbage is referred to twice, or is garbage and live.

    Costs one look through the trace where they name objects, nothing where they do not. A transition is refused for
    this before it is committed; `check_change` therefore leaves it out.
    """
    keys = {key for diff in diffs if diff.trace is not None for batch in diff.trace.added for key in batch.keys}
    keys |= {key for diff in diffs if diff.contents is not None and diff.contents[1] for key in diff.contents[1].keys}
    keys |= {key for diff in diffs for key, _, after in diff.garbage if after is not None}
    if not keys:
        return
    live = [part.key for batch in state.stored for part in batch.parts if part.key in keys]
    live += [rollup.key for rollup in state.rollups.values() if rollup.key in keys]
    found = [f"{key} is both garbage and referred to" for key in live if key in state.garbage]
    if len(set(live)) != len(live):
        found.append("a blob is referred to twice")
    _refuse(found, seqno)


def _later(diff: StateDiff, new: State, seqno: SeqNo) -> list[str]:
    """Things that are marked as later than this transition, and ids that are both retired and live."""
    marks = [] if diff.trace is None else [batch.born for batch in diff.trace.added]
    retired = list[str]()
    if diff.garbage or diff.retired:
        marks += [garbage.seqno for _, _, garbage in diff.garbage if garbage is not None]
        marks += [at for _, _, at in diff.retired if at is not None]
        retired += [id_ for id_, _, after in diff.retired if after is not None]
    found = [f"seqno {at} is beyond {seqno}" for at in marks if at > seqno]
    return found + [f"{id_} is both live and retired" for id_ in retired if id_ in new.writers or id_ in new.readers]


def _trace_change(new: State, diff: StateDiff) -> list[str]:
    if diff.trace is None:
        return []
    found = [] if diff.trace.added else ["batches went without anything in their place"]
    if (least := least_for_batches(diff.trace.added)) > new.format:
        found.append(f"a batch says what only format {least} can, in format {new.format}")
    for added in diff.trace.added:
        found += batch_problems(added, new)
        is_last = new.trace[-1] is added  # as what is appended always is
        index = len(new.trace) - 1 if is_last else bisect_left(new.trace, added.lo, key=lambda batch: batch.lo)
        if index == len(new.trace) or new.trace[index] is not added:
            found.append(f"batch {added.id} is out of order")
        around = new.trace[max(0, index - 1) : index + 2]
        found += _contiguous(around, first=index <= 1)
        if added.since > new.since:
            found.append(f"batch {added.id} has since {added.since} beyond {new.since}")
        found += [f"{key} is both garbage and referred to" for key in added.keys if key in new.garbage]
        found += [f"{key} has no uploader" for key in added.keys if not _has_uploader(key)]
    return found


def _contiguous(batches: tuple[Batch, ...], first: bool) -> list[str]:
    found = []
    if first and batches and (batches[0].lower != MINIMUM or batches[0].lo != 0):
        found.append("the trace does not start at the minimum")
    found += [f"batch {batch.id} has an empty range of ids" for batch in batches if not batch.lo < batch.hi]
    for left, right in pairwise(batches):
        if left.upper != right.lower or left.hi != right.lo:
            found.append(f"batches {left.id} [{left.lower}, {left.upper}) and {right.id} [{right.lower}, … do not meet")
    return found


def _trace(state: State) -> list[str]:
    found = _contiguous(state.trace, first=True)
    for batch in state.trace:
        found += [f"batch {batch.id}: {problem}" for problem in batch_problems(batch, state)]
        if batch.since > state.since:
            found.append(f"batch {batch.id} has since {batch.since} beyond the shard's {state.since}")
    return found


def _schemas(state: State) -> list[str]:
    found = [] if state.schemas else ["there is no schema"]
    if no_keys := [reason for schema in state.schemas if (reason := no_key(schema)) is not None]:
        return no_keys  # what evolves into what is only known of schemas that a shard can have
    for older, newer in pairwise(state.schemas):
        try:
            older.check_additive(newer)
        except SchemaMismatch as mismatch:
            found.append(mismatch.message)
    return found


def _says_too_much(state: State) -> list[str]:
    least = least_for_state(state)
    return [f"it says what only format {least} can, in format {state.format}"] if least > state.format else []


def _totals(state: State) -> list[str]:
    sums = {
        "inline_size": sum(batch.inline_size for batch in state.trace),
        "fingerprint": sum(batch.fingerprint for batch in state.trace) % MODULUS,
        "count": sum(batch.count for batch in state.trace),
        "size": sum(batch.size for batch in state.trace),
    }
    found = [f"{name} is {getattr(state, name)}, not {n}" for name, n in sums.items() if getattr(state, name) != n]
    counted = state.appended_bytes, state.maintained_bytes
    if min(counted) < 0 or (state.format < COUNTS_BYTES and counted != (0, 0)):
        found.append(f"{counted} bytes are said to have been written, in format {state.format}")
    if state.inline_size > INLINE_TOTAL_BYTES:
        found.append(f"{state.inline_size} inline bytes")
    return found


def _keys(state: State) -> list[str]:
    parts = [key for batch in state.stored for key in batch.keys]
    rollups = [rollup.key for rollup in state.rollups.values()]
    live = parts + rollups
    found = [f"{key} is both garbage and referred to" for key in parts if key in state.garbage]
    if len(set(live)) != len(live):
        found.append("a blob is referred to twice")
    found += [f"{key} has no uploader" for key in parts if not _has_uploader(key)]
    return found


def _has_uploader(key: PartKey) -> bool:
    """Whether the key says who uploaded it: a registered writer, or one of the pending area."""
    return bool(WRITER.fullmatch(uploader_of(key))) or parse_pending_key(key) is not None


def _outcomes(state: State, some: tuple[Outcome, ...], seqno: SeqNo) -> list[str]:
    """What is wrong with the format, with the number of outcomes, and with `some` outcomes that follow one another."""
    found = [] if FIRST <= state.format <= NEWEST else [f"format {state.format}"]
    if (state.format >= REMEMBERS_OUTCOMES) is not bool(state.outcomes):
        found.append(f"{len(state.outcomes)} outcomes are remembered in format {state.format}")
    if len(state.outcomes) > OUTCOMES_KEPT:
        found.append(f"{len(state.outcomes)} outcomes are remembered, more than {OUTCOMES_KEPT}")
    for before, after in pairwise(some):
        same_row = before.seqno == after.seqno and state.format >= GROUPS
        if not ((before.seqno < after.seqno or same_row) and before.upper < after.upper):
            found.append(f"the outcome at v{after.seqno} does not come after that at v{before.seqno}")
    if some and (some[-1].seqno > seqno or (some[-1].upper != state.upper and not state.is_finished())):
        found.append(f"the last outcome is {some[-1].upper} at v{some[-1].seqno}, and upper is {state.upper}")
    return found


def _producers(state: State, some: Collection[tuple[str, Produced]], seqno: SeqNo) -> list[str]:
    """What is wrong with how many producers there are, and with `some` of them."""
    found = [f"{len(state.producers)} producers"] if len(state.producers) > PRODUCERS_MOST else []
    if some and state.format < PRODUCERS:
        found.append(f"there are producers in format {state.format}")
    for name, last in some:
        if (reason := problems_of(name, last.sequence)) is not None:
            found.append(f"{reason} is malformed")
        if last.seqno > seqno or not last.upper <= state.upper:
            found.append(f"producer {name!r} appended up to {last.upper} at v{last.seqno}, beyond upper or v{seqno}")
    return found


def _rollups(state: State, seqno: SeqNo) -> list[str]:
    found = [f"{len(state.rollups)} rollups"] if len(state.rollups) > 2 else []
    for at, rollup in state.rollups.items():
        if parse_rollup_key(rollup.key) != at or at >= seqno:
            found.append(f"{rollup.key!r} cannot hold v{at} in the state at v{seqno}")
        if rollup.key in state.garbage:
            found.append(f"{rollup.key} is both garbage and referred to")
    return found


def _holders(state: State) -> list[str]:
    found = [f"{id_} holds {r.since}, before since" for id_, r in state.readers.items() if r.since < state.since]
    return found + [f"{name} holds {h.since}, before since" for name, h in state.holds.items() if h.since < state.since]


def _ids(state: State, seqno: SeqNo) -> list[str]:
    found = _holders(state)
    found += [f"writer id {id_!r} is malformed" for id_ in state.writers if not WRITER.fullmatch(id_)]
    found += [f"reader id {id_!r} is malformed" for id_ in state.readers if not READER.fullmatch(id_)]
    found += [f"{id_} is both live and retired" for id_ in (*state.writers, *state.readers) if id_ in state.retired]
    future = [
        *(r.seqno for r in state.readers.values()), *(g.seqno for g in state.garbage.values()),
        *state.retired.values(), *(batch.born for batch in state.stored),
    ]  # fmt: skip
    return found + [f"seqno {at} is beyond {seqno}" for at in future if at > seqno]


def _refuse(broken: list[str], seqno: SeqNo) -> None:
    if broken:
        raise InvariantViolated(
            f"the state at v{seqno} breaks what must always hold: {'; '.join(broken[:8])}. Nothing was written; "
            "this is a bug in Persist or damage to the log: keep the location as it is and report it",
            broken=broken, seqno=seqno,
        )  # fmt: skip


APPENDS = frozenset({"CompareAndAppend", "Append", "Absorb"})
MOVES_UPPER = APPENDS | {"Inherit"}
"""Commands after which upper may be another one: a rendition shard takes over how far a shard was."""
REWRITES = frozenset({"ApplyCompaction", "KeepContents"})
KEEP_SINCE = REWRITES | {"Expire", "Retire", "Heartbeat"}


def history_problems(old: State, new: State, seqno: SeqNo, commands: Collection[str] | None = None) -> list[str]:
    """Say what is wrong with `new` at `seqno` as what follows `old`, a sentence each.

    `commands` are those of the row in between that changed something; None: that is not known.
    """
    since, before = new.seqno_since(seqno), old.seqno_since(SeqNo(seqno - 1))
    found = [] if before <= since else [f"seqno_since went back, from {before} to {since}"]
    if not (old.since <= new.since and old.upper <= new.upper):
        found.append(f"since or upper went back, from {old.since}, {old.upper} to {new.since}, {new.upper}")
    for id_ in old.readers.keys() & new.readers.keys():
        was, is_ = old.readers[id_], new.readers[id_]
        if not (was.since <= is_.since and was.seqno <= is_.seqno):
            found.append(f"{id_} holds what it had given up")
    found += [f"{id_} came back" for id_ in old.retired if id_ in new.writers or id_ in new.readers]
    if not (old.appended_bytes <= new.appended_bytes and old.maintained_bytes <= new.maintained_bytes):
        found.append("the bytes ever written went back")
    return found + _by_commands(old, new, set(commands or ()), is_known=commands is not None)


def _by_commands(old: State, new: State, done: set[str], *, is_known: bool) -> list[str]:
    """What is wrong with what such commands changed."""
    found, named = [], ", ".join(sorted(done))
    if not done & MOVES_UPPER and not new.is_finished() and old.upper != new.upper:
        found.append("upper moved without an append")
    if not done & APPENDS and not new.is_finished() and old.fingerprint != new.fingerprint:
        found.append("the contents changed without an append")
    if not is_known:
        return found
    if not done & APPENDS and old.appended_bytes != new.appended_bytes:
        found.append(f"{named} counts as an append")
    if not done & REWRITES and old.maintained_bytes != new.maintained_bytes:
        found.append(f"{named} counts as a compaction")
    if done <= KEEP_SINCE and old.since != new.since:
        found.append(f"since jumped from {old.since} to {new.since} in {named}")
    return found
