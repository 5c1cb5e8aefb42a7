"""Contents that are kept ahead: what the first batches of a trace come to, beside them, in one run or in clusters.

While since stays, history is in the trace, and merging it makes no read cheaper: most of its updates do not count. So
the contents as of T are kept beside it. A read at T or later takes them and the batches beyond (`State.batches_at`);
what is before T, and changes, are read from the trace. Once since has come to T, they take the place of the batches
that they stand for, without being written again.

They are sound by the sums of those batches, which no compaction changes. They stand for whole batches for as long as
they are kept: no batch is ever on both sides of their end. Parts of former contents that no later update touches are
theirs as well, as they were, with the times of then. See docs/design/0170-contents-ahead.md.
"""

from __future__ import annotations

import msgspec

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff
from persist_lib.core.formats import CLUSTERS, CONTENTS, least_for_batches
from persist_lib.core.state import Batch, Part, State
from persist_lib.core.sums import total
from persist_lib.core.trace import batch_problems, cannot_link, dead_uploaders, freed
from persist_lib.frontier import MINIMUM
from persist_lib.ids import SeqNo


def _ends_at(state: State, hi: int) -> bool:
    place = state.index_of(hi)
    return place > 0 and state.trace[place - 1].hi == hi


def changed_contents(diff: StateDiff, new: State) -> list[str]:
    """What is wrong with the contents that `diff` may have broken: where they end, if it changed only the trace."""
    if diff.contents is not None:
        return problems(new)
    return [] if diff.trace is None else _end_problems(new)


def _end_problems(state: State) -> list[str]:
    kept = state.contents
    if kept is None or _ends_at(state, kept.hi):
        return []
    return [f"the contents end at {kept.hi}, which is within a batch"]


def problems(state: State) -> list[str]:
    """What is wrong with the contents that are kept, one sentence each."""
    kept = state.contents
    if kept is None:
        return []
    found = [f"the contents: {one}" for one in batch_problems(kept, state)]
    if misplaced := _end_problems(state):
        return found + misplaced
    time, batches = kept.since.time, state.trace[: state.index_of(kept.hi)]
    if (kept.lo, kept.lower, kept.upper) != (0, MINIMUM, batches[-1].upper):
        found.append(f"the contents are {kept.id} [{kept.lower}, {kept.upper}), and stand for [0, {batches[-1].upper})")
    if time is None or kept.upper.time != time + 1 or not all(_is_as_of(part, time) for part in kept.parts):
        found.append(f"the contents as of {kept.since} have other times, or end at {kept.upper}")
    if (len(kept.runs) > 1 and state.format < CLUSTERS) or not kept.exact or kept.inline_size:
        found.append("the contents are not one run of objects")
    expected = total(batch.sums for batch in batches)
    if (kept.fingerprint, kept.diff_sum) != (expected.fingerprint, expected.diff_sum) or kept.count > expected.count:
        found.append(f"the contents add up to {kept.sums}, and the batches that they stand for to {expected}")
    return found


def _is_as_of(part: Part, time: int) -> bool:
    """Whether a part may be of contents as of a time: of that time, or proven by its sums and of an earlier one."""
    return part.time_lower == part.time_upper and (
        part.time_lower == time or (part.sums is not None and part.time_lower < time)
    )


def keep_contents(state: State, seqno: SeqNo, command: c.KeepContents) -> StateDiff | r.Refusal:
    """What keeping these contents, or none, changes."""
    old, new = state.contents, command.contents
    held = {part.key: part for part in (old.parts if old is not None else ())}
    if command.worker not in state.writers:
        return r.NotLive((command.worker,))
    if new is None:
        return r.AlreadyDone() if old is None else StateDiff(contents=(old, None), garbage=freed(held, (), seqno))
    if state.format < CONTENTS:
        return r.NeedsFormat("contents that are kept ahead", CONTENTS, state.format)
    if (least := least_for_batches((new,))) > state.format:
        return r.NeedsFormat("such a part", least, state.format)
    if (old is not None and new.hi <= old.hi) or not _ends_at(state, new.hi):
        return r.InputsGone((new.id,))
    new = msgspec.structs.replace(new, born=seqno)
    if strangers := dead_uploaders(state, (key for key in new.keys if key not in held)):
        return r.NotLive(strangers)
    if found := problems(msgspec.structs.replace(state, contents=new)):
        return r.NotEquivalent("; ".join(found))
    if refusal := cannot_link(state, new, held):
        return refusal
    return StateDiff(contents=(old, new), garbage=freed(held, new.keys, seqno))


def is_across(state: State, gone: tuple[Batch, ...]) -> bool:
    """Whether these batches are on both sides of the contents' end, so that one may not replace them."""
    kept = state.contents
    return kept is not None and gone[0].lo < kept.hi < gone[-1].hi


def is_replaced(state: State, output: Batch) -> bool:
    """Whether the trace, with `output` in it, itself has what they are: one batch, as of their time or later."""
    kept = state.contents
    return (
        kept is not None
        and output.id == kept.id
        and kept.since <= output.since
        and len(output.runs) <= max(1, len(kept.runs))
    )
