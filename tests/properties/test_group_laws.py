"""Laws of groups: several commands that are committed as one row come to the same as one row each."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persist_lib.core import commands as c
from persist_lib.core.deciding import is_out_for_ever
from persist_lib.core.diff import OutcomesEdit, StateDiff, TraceEdit, apply_diff
from persist_lib.core.formats import GROUPS
from persist_lib.core.groups import BYTES_MOST, CHANGES_MOST, apply_together, size_of
from persist_lib.core.outcomes import find_outcome
from persist_lib.core.state import Batch, Outcome, Part, State
from persist_lib.core.transitions import change
from persist_lib.core.validate import check_change, check_group
from persist_lib.errors import InvariantViolated
from persist_lib.frontier import MINIMUM, at
from persist_lib.ids import PartKey, SeqNo, WriterId, format_writer_id
from tests.properties.core_commands import Commands
from tests.properties.histories import CREATED, CREATED_4, Shard, together

W1 = format_writer_id(1)


def grown(seed: int, created: c.Create = CREATED_4, steps: int = 40) -> tuple[Shard, Commands]:
    shard, commands = Shard(), Commands(Random(seed), 0.9)
    shard.run(created)
    for _ in range(steps):
        shard.run_together(together(shard, commands))
    return shard, commands


def without_seqnos(value: object) -> object:
    """A state or an answer as plain values, in which all seqnos from 10,000 on are the same."""
    plain = msgspec.to_builtins(value, str_keys=True)

    def same(item: object) -> object:
        if isinstance(item, dict):
            return {key: same(one) for key, one in item.items()}
        if isinstance(item, (list, tuple)):
            return [same(one) for one in item]
        return 10_000 if isinstance(item, int) and not isinstance(item, bool) and 10_000 <= item < 10_500 else item

    return same(plain)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=15)
def test_a_group_comes_to_the_same_as_one_row_for_each_command(seed):
    """But for seqnos: where each command has a row of its own, they are higher."""
    shard, commands = grown(seed, steps=15)
    lot = [one for one in together(shard, commands) if not isinstance(one, (c.AddRollup, c.DowngradeSince))]
    applied = apply_together(shard.state, SeqNo(10_000), lot)
    state, number = shard.state, 10_000
    for command, answer in zip(lot, applied.answers, strict=False):
        alone = change(state, SeqNo(number), command)
        assert type(alone) is type(answer)
        assert without_seqnos(alone) == without_seqnos(answer)
        if isinstance(alone, StateDiff):
            state, number = apply_diff(state, alone), number + 1
    assert without_seqnos(state) == without_seqnos(applied.state)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=10)
def test_in_older_formats_each_row_has_one_change(seed):
    shard, commands = Shard(), Commands(Random(seed), 0.9)
    shard.run(CREATED)
    for _ in range(30):
        lot = together(shard, commands)
        applied = shard.run_together(lot) if shard.state.format < GROUPS else apply_together(State(), SeqNo(1), ())
        assert len(applied.diffs) <= 1
        assert not applied.diffs or isinstance(applied.answers[-1], StateDiff), (
            "what follows it belongs to the next row"
        )


def test_random_groups_have_many_changes_and_refusals_in_one_row():
    changes, mixed = 0, 0
    for seed in range(14):
        shard, commands = grown(seed, steps=20)
        for _ in range(10):
            applied = shard.run_together(together(shard, commands))
            changes = max(changes, len(applied.diffs))
            mixed += 0 < len(applied.diffs) < len(applied.answers)
    assert changes >= 5
    assert mixed >= 10


@given(seed=st.integers(0, 2**32))
@settings(max_examples=10)
def test_every_token_of_a_group_is_found_in_the_state_after_it(seed):
    shard, commands = grown(seed, steps=10)
    seqno = shard.next_seqno
    state = shard.run_together(together(shard, commands)).state
    for (token, lower, upper), at_ in shard.committed.items():
        if at_ == seqno and not state.is_finished():
            assert find_outcome(state, token, lower, upper) == Outcome(token, seqno, upper)


def appends(count: int, size: int = 0) -> list[c.Command]:
    part = Part(PartKey(""), size, 1, bytes(16), b"a", b"b", 0, 0, 0, bytes(size)) if size else None
    found: list[c.Command] = []
    for number in range(count):
        parts = () if part is None else (msgspec.structs.replace(part, time_lower=number, time_upper=number),)
        batch = Batch(0, 1, at(number), at(number + 1), MINIMUM, len(parts), 0, 0, parts, (0,) if parts else ())
        found.append(c.CompareAndAppend(W1, f"{number}".encode(), batch, 0))
    return found


@pytest.fixture
def shard() -> Shard:
    made = Shard()
    made.run(CREATED_4)
    made.run(c.RegisterWriter(W1, "ingest", 100))
    return made


def test_a_group_has_at_most_so_many_changes_and_about_so_many_bytes(shard):
    assert len(shard.run_together(appends(CHANGES_MOST + 10)).answers) == CHANGES_MOST
    lot = appends(400)[CHANGES_MOST:]
    assert len(shard.run_together(lot).answers) == len(lot)
    other = Shard()
    other.run(CREATED_4)
    other.run(c.RegisterWriter(W1, "ingest", 100))
    lot = appends(100, 16_000)
    applied = other.run_together(lot)
    assert (
        sum(map(size_of, lot[: len(applied.answers)]))
        <= BYTES_MOST
        < sum(map(size_of, lot[: len(applied.answers) + 1]))
    )
    assert BYTES_MOST / 2 < len(other.rows[-1]) < BYTES_MOST


@pytest.mark.parametrize("kind", ["appends", "writers", "holds", "heartbeats"])
def test_what_a_command_is_said_to_take_in_a_row_is_about_what_it_takes(shard, kind):
    lots: dict[str, Sequence[c.Command]] = {
        "appends": appends(50, 700),
        "writers": [c.RegisterWriter(WriterId(f"w{n:016x}"), "ingest", 2**62, "x" * 200) for n in range(50, 100)],
        "holds": [c.SetHold(f"hold {n}", MINIMUM, None, bytes(100)) for n in range(50)],
        "heartbeats": [c.Heartbeat((W1,), 1000 + n) for n in range(50)],
    }
    shard.run_together(lots[kind])
    said = sum(map(size_of, lots[kind]))
    assert said / 12 < len(shard.rows[-1]) <= said


def test_a_row_whose_appends_would_not_all_be_remembered_breaks_an_invariant(shard):
    """The limit of a group keeps it far from that; a reader refuses it all the same."""
    state, diffs = shard.state, []
    for command in appends(1030):
        diff = change(state, SeqNo(9), command)
        assert isinstance(diff, StateDiff)
        before, state = state, apply_diff(state, diff)
        check_change(before, diff, state, SeqNo(9))
        diffs.append(diff)
    check_group(diffs[:1000], after(shard.state, diffs[:1000]), SeqNo(9))
    with pytest.raises(InvariantViolated, match="remembered"):
        check_group(diffs, state, SeqNo(9))


def after(state: State, diffs: list[StateDiff]) -> State:
    for diff in diffs:
        state = apply_diff(state, diff)
    return state


def test_several_outcomes_at_one_seqno_break_an_invariant_in_older_formats(shard):
    state = shard.state
    for format_ in (3, 4):
        same = OutcomesEdit(0, (Outcome(b"a", SeqNo(2), at(1)), Outcome(b"b", SeqNo(2), at(2))))
        batch = Batch(0, 1, MINIMUM, at(2), MINIMUM, 0, 0, 0, born=SeqNo(2))
        diff = StateDiff(trace=TraceEdit((), (batch,)), outcomes=same)
        old = msgspec.structs.replace(state, format=format_, outcomes=(Outcome(b"", SeqNo(1), MINIMUM),))
        if format_ < GROUPS:
            with pytest.raises(InvariantViolated, match="outcome"):
                check_change(old, diff, apply_diff(old, diff), SeqNo(2))
        else:
            check_change(old, diff, apply_diff(old, diff), SeqNo(2))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=10)
def test_what_is_out_for_ever_changes_no_later_state(seed):
    """Many commands are kept while a shard continues, as a paused server keeps them, and tried at each later state."""
    shard, commands = Shard(), Commands(Random(seed), 0.9)
    shard.run(CREATED_4)
    kept: list[c.Command] = []
    out: list[c.Command] = []
    for _ in range(40):
        made = commands.any(shard.state, shard.next_seqno)
        if is_registered(shard.state, made):
            kept.append(made)
        shard.run_together(together(shard, commands))
        out += [one for one in kept if is_out_for_ever(shard.state, one) and one not in out]
        for one in out:
            assert not isinstance(change(shard.state, shard.next_seqno, one), StateDiff), one


def is_registered(state: State, command: c.Command) -> bool:
    """Whether whoever acts in a command is live, as it is for any command that a client sends."""
    actors = {getattr(command, name, None) for name in ("writer", "reader", "worker", "original", "id")}
    actors |= set(command.ids) if isinstance(command, c.Heartbeat) else set()
    if isinstance(command, (c.RegisterWriter, c.RegisterReader, c.CloneReader)):
        return True
    return all(id_ is None or id_ in state.writers or id_ in state.readers for id_ in actors)


def test_nearly_every_kind_of_command_is_out_for_ever_some_day_and_never_while_it_applies():
    seen: set[str] = set()
    for seed in range(40, 60):
        shard, commands = grown(seed, steps=30)
        commands.sane = 0.5
        for _ in range(90):
            made = commands.any(shard.state, shard.next_seqno)
            applies = isinstance(change(shard.state, shard.next_seqno, made), StateDiff)
            is_out = is_out_for_ever(shard.state, made)
            assert not (applies and is_out), made
            if is_out:
                seen.add(type(made).__name__)
    minted = {"RegisterWriter", "RegisterReader"}
    holds = {"SetHold", "DowngradeHold", "ReleaseHold", "SetRetention", "ForgetProducer", "Expire", "Finish"}
    kept = {"DiscardPending", "ForgetGarbage", "ForgetRetired", "Inherit", "Reserve"}
    assert {kind.__name__ for kind in c.Command.__args__} - seen <= minted | holds | kept
