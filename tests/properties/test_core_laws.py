"""Laws of the pure core: whatever is asked of whatever state, in whatever order."""

from __future__ import annotations

from itertools import chain
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff
from persist_lib.core.formats import REMEMBERS_OUTCOMES
from persist_lib.core.outcomes import find_outcome, is_excluded
from persist_lib.core.plan.garbage import plan_garbage, plan_orphans
from persist_lib.core.state import COUNTS_BYTES, Batch, State
from persist_lib.core.transitions import change
from persist_lib.core.validate import check_state
from persist_lib.format.log import GENESIS, StoredState, decode_row, decode_state, encode_state
from persist_lib.frontier import TOP
from persist_lib.ids import PartKey, SeqNo, WriterId, parse_rollup_key, uploader_of
from persist_lib.shard.log import apply_row
from tests.properties.core_commands import Commands
from tests.properties.histories import (
    CREATED,
    CREATED_1,
    CREATED_4,
    CREATED_6,
    CREATED_7,
    CREATED_9,
    CREATED_12,
    Shard,
    history,
    together,
)


class CoreMachine(RuleBasedStateMachine):
    """The shard against a plain list of what was appended to it."""

    def __init__(self) -> None:
        super().__init__()
        self.shard = Shard()

    @initialize(created=st.sampled_from([CREATED, CREATED_1, CREATED_4, CREATED_6, CREATED_7, CREATED_9, CREATED_12]))
    def create(self, created):
        self.shard.run(created)

    @rule(random=st.randoms(use_true_random=False), steps=st.integers(1, 6))
    def something(self, random, steps):
        for _ in range(steps):
            self.shard.run(Commands(random).any(self.shard.state, self.shard.next_seqno))

    @rule(random=st.randoms(use_true_random=False))
    def several_at_once(self, random):
        self.shard.run_together(together(self.shard, Commands(random)))

    @rule(random=st.randoms(use_true_random=False))
    def an_append_that_fits(self, random):
        commands = Commands(random, sane=1.0)
        if not self.shard.state.writers:
            self.shard.run(c.RegisterWriter(commands.writer(State()), "ingest", 2000))
        self.shard.run(commands.append(self.shard.state))

    @rule(random=st.randoms(use_true_random=False))
    def the_same_again(self, random):
        """An append that is remembered answers what it answered, whoever asks, whatever else it says; and changes
        nothing."""
        for (token, lower, upper), seqno in list(self.shard.committed.items()):
            outcome = find_outcome(self.shard.state, token, lower, upper)
            if outcome is not None:
                assert (outcome.token, outcome.upper, outcome.seqno) == (token, upper, seqno)
                batch = msgspec.structs.replace(Commands(random).batch("w1", lower, upper), lower=lower, upper=upper)
                answer = self.shard.run(c.CompareAndAppend(WriterId("w1"), token, batch, 0))
                assert answer == r.AlreadyDone(outcome)

    @rule()
    def what_was_put_at_the_next_time_is_sent_again(self):
        """However late, and though nothing but its token tells that it was there: it is never committed again."""
        for command in self.shard.placed[-8:]:
            answer = self.shard.run(command)
            if not isinstance(answer, (r.Forgotten, r.NeedsFormat)):
                assert isinstance(answer, r.AlreadyDone)
                assert answer.outcome is not None
                assert answer.outcome.token == command.token
                assert answer.outcome in self.shard.state.outcomes

    @rule(random=st.randoms(use_true_random=False))
    def somebody_asks_what_was_excluded(self, random):
        commands = Commands(random)
        for _ in range(5):
            lower = commands.frontier()
            asked = (bytes([random.randrange(256), random.randrange(2)]), lower, commands.frontier(lower))
            known = find_outcome(self.shard.state, *asked) is not None
            if asked[1] < asked[2] and not known and is_excluded(self.shard.state, *asked[1:]):
                self.shard.excluded.append(asked)

    @invariant()
    def what_was_committed_is_remembered_or_not_excluded(self):
        state = self.shard.state
        for (token, lower, upper), seqno in self.shard.committed.items():
            outcome = find_outcome(state, token, lower, upper)
            if outcome is None:
                assert not is_excluded(state, lower, upper)
                assert state.format < REMEMBERS_OUTCOMES or seqno <= state.outcomes[0].seqno
        assert not self.shard.committed.keys() & set(self.shard.excluded), "never is never"

    @invariant()
    def contents_are_what_was_appended(self):
        state = self.shard.state
        if not state.is_finished():
            assert state.fingerprint == sum(batch.fingerprint for batch in self.shard.appended) % 2**64
            assert state.count <= sum(batch.count for batch in self.shard.appended)
            diff_sums = sum(b.diff_sum for b in self.shard.appended) - sum(b.diff_sum for b in state.trace)
            assert diff_sums % 2**64 == 0

    @invariant()
    def what_is_there_was_written(self):
        state = self.shard.state
        if state.schemas and self.shard.states[1].format >= COUNTS_BYTES:
            assert state.size <= state.appended_bytes + state.maintained_bytes
            assert state.appended_bytes >= state.size or state.maintained_bytes

    def teardown(self):
        """Rebuilding from any rollup and the rows after it gives identical bytes."""
        for start in {0, len(self.shard.rows) // 2, max(0, len(self.shard.rows) - 1)}:
            state = decode_state(self.shard.copies[start], "copy").state
            for row in self.shard.rows[start:]:
                state = apply_row(state, decode_row(row, "row"), "row")
            check_state(state, self.shard.version.seqno)
            assert encode_state(StoredState(self.shard.version.seqno, GENESIS, state)) == self.shard.copies[-1]


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=25, stateful_step_count=25)


def test_the_random_commands_get_nearly_all_commands_done_and_nearly_all_refusals():
    shards = [history(seed, 150) for seed in range(30)]
    accepted, refused = (set().union(*(getattr(s, what) for s in shards)) for what in ("accepted", "refused"))
    assert {kind.__name__ for kind in c.Command.__args__} - accepted <= {"Finish", "Inherit"}
    assert {kind.__name__ for kind in r.Refusal.__args__} - refused <= {"InlineFull", "Finished", "TooManyProducers"}


@pytest.mark.parametrize("kind", [c.CompareAndAppend, c.Append, c.ApplyCompaction])
def test_the_random_commands_link_what_others_have_uploaded(kind):
    """Live writers link parts of their own, and try those of other live ones, of retired ones and of unknown ones."""
    wanted = {("live", True), ("other live", True), ("other retired", False), ("other unknown", False)}
    seen: set[tuple[str, bool]] = set()
    for seed in range(200):
        if wanted <= seen:
            break
        shard, commands = Shard(), Commands(Random(seed), 0.95)
        shard.run(CREATED)
        for _ in range(90):
            command, state = commands.any(shard.state, shard.next_seqno), shard.state
            answer = shard.run(command)
            if not isinstance(command, kind):
                continue
            batch = command.output if isinstance(command, c.ApplyCompaction) else command.batch
            actor = command.worker if isinstance(command, c.ApplyCompaction) else command.writer
            for uploader in {uploader_of(key) for key in batch.keys} if actor in state.writers else ():
                is_other = "other " * (uploader != actor)
                status = "live" if uploader in state.writers else "retired" if uploader in state.retired else "unknown"
                seen.add((is_other + status, isinstance(answer, StateDiff)))
    assert wanted <= seen


@given(seed=st.integers(0, 2**32), sane=st.sampled_from([0.2, 0.6, 0.95]))
@settings(max_examples=60)
def test_no_command_makes_the_core_raise_or_break_an_invariant(seed, sane):
    history(seed, 40, sane)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30)
def test_nothing_on_a_shard_that_was_never_made_changes_anything(seed):
    commands = Commands(Random(seed))
    for _ in range(20):
        command = commands.any(State(), SeqNo(1))
        if not isinstance(command, c.Create):
            assert not isinstance(change(State(), SeqNo(1), command), StateDiff)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30)
def test_what_a_collection_deletes_no_state_from_seqno_since_on_refers_to(seed):
    shard = history(seed, 80, 0.95)
    plan = plan_garbage(shard.state, shard.version.seqno)
    since = shard.state.seqno_since(shard.version.seqno)
    for state in shard.states[since:]:
        referred = {key for batch in state.stored for key in batch.keys} | {r.key for r in state.rollups.values()}
        assert not referred & plan.keys.keys()
    assert plan.truncate_below <= since
    assert plan.truncate_below in {0, *shard.state.rollups}
    assert plan.keys.keys() <= shard.state.garbage.keys()
    parts = [key for key in plan.keys if parse_rollup_key(key) is None]
    assert all(shard.state.garbage[key].seqno < shard.state.newest_rollup for key in parts)
    held = sum(h.keys for h in plan.held)
    assert held + len(plan.keys) == len(shard.state.garbage), "whatever stays is explained"
    assert sum(h.size for h in plan.held) + plan.size == sum(g.size for g in shard.state.garbage.values())


@given(seed=st.integers(0, 2**32), later=st.integers(1, 60))
@settings(max_examples=30)
def test_no_orphan_is_ever_linked_by_what_happens_after_the_audit(seed, later):
    """All keys that anybody might ever upload are listed; none that is judged an orphan is accepted afterwards."""
    shard, commands = Shard(), Commands(Random(seed))
    shard.run(CREATED)
    for _ in range(60):
        shard.run(commands.any(shard.state, shard.next_seqno))
    tried = [commands.any(shard.state, shard.next_seqno) for _ in range(40)]
    keys = {PartKey(key) for command in tried for key in _keys(command)} | shard.state.garbage.keys()
    orphans = plan_orphans(shard.state, [(key, 1) for key in sorted(keys)])
    assert not orphans.keys.keys() & shard.state.garbage.keys()
    more = (commands.any(shard.state, shard.next_seqno) for _ in range(later))
    for command in chain(tried, more):
        # Ids are minted once; here they are few, so that one that uploaded an orphan must not be minted again.
        if not (isinstance(command, c.RegisterWriter) and any(key.startswith(command.writer) for key in orphans.keys)):
            shard.run(command)
        linked = {key for batch in shard.state.stored for key in batch.keys}
        assert not orphans.keys.keys() & (linked | {rollup.key for rollup in shard.state.rollups.values()})


def _keys(command: c.Command) -> set[str]:
    match command:
        case c.CompareAndAppend(_, _, batch) | c.Append(_, _, batch) | c.ApplyCompaction(_, _, batch):
            return set(batch.keys)
        case c.KeepContents(_, Batch() as batch):
            return set(batch.keys)
        case c.AddRollup(_, _, rollup):
            return {rollup.key}
        case _:
            return set()


@pytest.mark.parametrize("seed", range(4))
def test_a_tombstone_refers_to_nothing_and_no_command_changes_what_it_says(seed):
    shard = history(seed, 60, 0.95)
    for id_ in (*shard.state.writers, *shard.state.readers):
        shard.run(c.Retire(id_))
    for name, hold in list(shard.state.holds.items()):
        shard.run(c.ReleaseHold(name, hold.opaque))
    for name, pin in list(shard.state.pins.items()):
        shard.run(c.Unpin(name, pin.opaque))
    shard.run(c.Finish())
    state = shard.state
    assert state.is_finished()
    assert (state.since, state.upper) == (TOP, TOP)
    commands = Commands(Random(seed))
    for _ in range(200):
        shard.run(commands.any(shard.state, shard.next_seqno))
    assert (shard.state.trace, shard.state.schemas, shard.state.since) == (state.trace, state.schemas, state.since)
    assert not shard.state.writers
    assert not shard.state.readers
    assert len(shard.state.rollups) <= 1
