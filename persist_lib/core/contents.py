"""Contents that are kept ahead: what the first batches of a trace come to, in one run beside them.

While since stays, history is in the trace, and merging it makes no read cheaper: most of its updates do not count. So
the contents as of T are kept beside it. A read at T or later takes them and the batches beyond (`State.batches_at`);
what is before T, and changes, are read from the trace. Once since has come to T, they take the place of the batches
that they stand for, without being written again.

They are sound by the sums of those batches, which no compaction changes. They stand for whole batches for as long as
they are kept: no batch is ever on both sides of their end. See docs/design/0170-contents-ahead.md.
"""

from __future__ import annotations

import msgspec

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff
from persist_lib.core.formats import CONTENTS
from persist_lib.core.state import Batch, Garbage, State
from persist_lib.core.sums import total
from persist_lib.core.trace import batch_problems, known_keys
from persist_lib.frontier import MINIMUM
from persist_lib.ids import PartKey, SeqNo, uploader_of

Edits = tuple[tuple[PartKey, Garbage | None, Garbage | None], ...]


def stood_for(state: State, hi: int) -> tuple[Batch, ...]:
    """The batches before `hi`, oldest first; none where one is on both sides of it."""
    found = state.trace[: state.index_of(hi)]
    return found if found and found[-1].hi == hi else ()


def changed_contents(diff: StateDiff, new: State) -> list[str]:
    """What is wrong with the contents that `diff` may have broken: where they end, if it changed only the trace."""
    if diff.contents is not None:
        return problems(new)
    return [] if diff.trace is None else _end_problems(new)


def _end_problems(state: State) -> list[str]:
    kept = state.contents
    if kept is None or stood_for(state, kept.hi):
        return []
    return [f"the contents end at {kept.hi}, which is within a batch"]


def problems(state: State) -> list[str]:
    """What is wrong with the contents that are kept, one sentence each."""
    kept = state.contents
    if kept is None:
        return []
    found = [f"the contents: {one}" for one in batch_problems(kept, state)] + _end_problems(state)
    time, batches = kept.since.time, stood_for(state, kept.hi)
    if not batches:
        return found
    if (kept.lo, kept.lower, kept.upper) != (0, MINIMUM, batches[-1].upper):
        found.append(f"the contents are {kept.id} [{kept.lower}, {kept.upper}), and stand for [0, {batches[-1].upper})")
    if (
        time is None
        or kept.upper.time != time + 1
        or any((p.time_lower, p.time_upper) != (time, time) for p in kept.parts)
    ):
        found.append(f"the contents as of {kept.since} have other times, or end at {kept.upper}")
    if len(kept.runs) > 1 or not kept.exact or kept.inline_size:
        found.append("the contents are not one run of objects")
    expected = total(batch.sums for batch in batches)
    if (kept.fingerprint, kept.diff_sum) != (expected.fingerprint, expected.diff_sum) or kept.count > expected.count:
        found.append(f"the contents add up to {kept.sums}, and the batches that they stand for to {expected}")
    return found


def keep_contents(state: State, seqno: SeqNo, command: c.KeepContents) -> StateDiff | r.Refusal:
    """What keeping these contents, or none, changes."""
    old, new = state.contents, command.contents
    if command.worker not in state.writers:
        return r.NotLive((command.worker,))
    if new is None:
        return r.AlreadyDone() if old is None else StateDiff(contents=(old, None), garbage=freed(old, (), seqno))
    if state.format < CONTENTS:
        return r.NeedsFormat("contents that are kept ahead", CONTENTS, state.format)
    if old is not None and new.hi <= old.hi:
        return r.InputsGone((new.id,))
    if not stood_for(state, new.hi):
        return r.InputsGone((new.id,))
    new = msgspec.structs.replace(new, born=seqno)
    held = {part.key: part for part in (old.parts if old is not None else ())}
    fresh = tuple(key for key in new.keys if key not in held)
    if strangers := tuple(sorted({uploader_of(key) for key in fresh} - state.writers.keys())):
        return r.NotLive(strangers)
    if found := problems(msgspec.structs.replace(state, contents=new)):
        return r.NotEquivalent("; ".join(found))
    if any(part != held.get(part.key, part) for part in new.parts):
        return r.NotEquivalent("a part that is kept is described differently")
    if known := known_keys(state, fresh):
        return r.Exists(known[0])
    return StateDiff(contents=(old, new), garbage=freed(old, new.keys, seqno))


def freed(old: Batch | None, keys: tuple[PartKey, ...], seqno: SeqNo) -> Edits:
    """The objects of contents that are kept no more, as garbage, but for `keys`."""
    gone = [] if old is None else [part for part in old.parts if part.key not in keys]
    return tuple((part.key, None, Garbage(seqno, part.size)) for part in sorted(gone, key=lambda one: one.key))


def is_across(state: State, gone: tuple[Batch, ...]) -> bool:
    """Whether these batches are on both sides of the contents' end, so that one may not replace them."""
    kept = state.contents
    return kept is not None and gone[0].lo < kept.hi < gone[-1].hi


def is_replaced(state: State, output: Batch) -> bool:
    """Whether the trace, with `output` in it, itself has what they are: one batch, as of their time or later."""
    kept = state.contents
    return kept is not None and output.id == kept.id and kept.since <= output.since and len(output.runs) <= 1
