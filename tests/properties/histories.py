"""Random histories of a shard in memory, with a plain account of what happened."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.diff import StateDiff, apply_diff
from persist_lib.core.formats import CONTENTS, FIRST, GROUPS, IDENTITIES, PART_SUMS, PINS
from persist_lib.core.groups import Applied, apply_together
from persist_lib.core.pending import parse_pending_key
from persist_lib.core.state import Batch, State, Version
from persist_lib.core.transitions import apply, change
from persist_lib.format.log import GENESIS, LogRow, Step, StoredState, decode_state, encode_row, encode_state
from persist_lib.frontier import Antichain
from persist_lib.ids import SeqNo, is_pending, uploader_of
from persist_lib.schema.schema import Schema
from persist_lib.shard.log import next_group
from persist_lib.times import PER_SECOND
from tests.properties.core_commands import Commands
from tests.scripts.language import commit_and_check, commit_group_and_check, rollup_bytes

CREATED = c.Create(Commands(Random(0)).schema(0))

CREATED_4 = c.Create(Commands(Random(0)).schema(0), GROUPS)

CREATED_6 = c.Create(Commands(Random(0)).schema(0), CONTENTS)

CREATED_7 = c.Create(Commands(Random(0)).schema(0), PINS)

CREATED_9 = c.Create(Commands(Random(0)).schema(0), PART_SUMS)

CREATED_12 = c.Create(Schema({"id": "int64"}, {"n": "int64 not null identity"}), IDENTITIES)

CREATED_1 = c.Create(Commands(Random(0)).schema(0), FIRST)


class Shard:
    """A shard in memory, its log, and what a plain list of what happened says about it."""

    def __init__(self) -> None:
        self.version = Version(SeqNo(0), State(), GENESIS)
        self.states = [State()]
        self.rows: list[bytes] = []
        self.copies = [rollup_bytes(self.version)]
        self.appended: list[Batch] = []
        self.committed: dict[tuple[bytes, Antichain, Antichain], SeqNo] = {}
        self.excluded: list[tuple[bytes, Antichain, Antichain]] = []
        self.placed: list[c.AppendNow] = []
        self.produced: dict[str, tuple[int, SeqNo, Antichain]] = {}
        self.numbers: dict[str, int] = {}
        self.refused: set[str] = set()
        self.accepted: set[str] = set()

    @property
    def state(self) -> State:
        return self.version.state

    @property
    def next_seqno(self) -> SeqNo:
        return SeqNo(self.version.seqno + 1)

    def run(self, command: c.Command) -> StateDiff | r.Refusal:
        before = rollup_bytes(self.version)
        answer = change(self.state, self.next_seqno, command)
        assert answer == change(decode_state(before, "copy").state, self.next_seqno, command)
        assert rollup_bytes(self.version) == before, "change() altered its argument"
        if not isinstance(answer, StateDiff):
            self.refused.add(type(answer).__name__)
            if isinstance(answer, r.AlreadyProduced):
                assert answer.sequence <= self.produced[answer.name][0], "only what was committed is said to be"
            assert apply(self.state, self.next_seqno, command) == answer
            return answer
        self.accepted.add(type(command).__name__)
        self.commit(command, answer)
        return answer

    def run_together(self, commands: Sequence[c.Command]) -> Applied:
        """Several commands as one row: as many of the first as may be, each of them checked and accounted for."""
        before = rollup_bytes(self.version)
        applied = apply_together(self.state, self.next_seqno, commands)
        assert rollup_bytes(self.version) == before, "apply_together() altered its argument"
        assert not commands or applied.answers
        if not applied.diffs:
            assert applied.state == self.state
            return applied
        old, state = self.version, self.state
        self.version = commit_group_and_check(old, commands, applied)
        steps = [
            Step(b"t", c.stored_name(command), "", answer)
            for command, answer in zip(commands, applied.answers, strict=False)
            if isinstance(answer, StateDiff)
        ]  # fmt: skip
        self.keep(next_group(old, steps, self.state, 0))
        for command, answer in zip(commands, applied.answers, strict=False):
            if not isinstance(answer, StateDiff):
                self.refused.add(type(answer).__name__)
                assert apply(state, self.version.seqno, command) == answer
                continue
            self.accepted.add(type(command).__name__)
            before_it, state = state, apply_diff(state, answer)
            self.account(before_it, state, command, answer)
        assert state == self.state
        return applied

    def commit(self, command: c.Command, diff: StateDiff) -> None:
        old = self.version
        row = LogRow(self.next_seqno, b"t", c.stored_name(command), 0, old.digest, None, diff)
        self.version = commit_and_check(old, diff, command)
        self.keep(row)
        self.account(old.state, self.state, command, diff)

    def keep(self, row: LogRow) -> None:
        self.rows.append(encode_row(row, self.version.state.format))
        self.states.append(self.state)
        self.copies.append(encode_state(StoredState(self.version.seqno, GENESIS, self.state)))

    def account(self, old: State, new: State, command: c.Command, diff: StateDiff) -> None:
        """Note what a command did, and check that step by itself."""
        if isinstance(command, (c.CompareAndAppend, c.Append, c.Absorb)):
            self.appended.append(command.batch)
            self.committed[command.token, old.upper, command.batch.upper] = self.version.seqno
        if isinstance(command, c.AppendNow):
            self.check_placed(old, new, command)
        if isinstance(command, (c.CompareAndAppend, c.AppendNow)) and command.producer is not None:
            name, sequence = command.producer
            assert sequence > self.produced.get(name, (-1,))[0], "no number is committed twice, nor a lower one"
            self.produced[name] = (sequence, self.version.seqno, new.upper)
        if isinstance(command, c.ForgetProducer):
            del self.produced[command.name]
        if isinstance(command, c.Reserve):
            assert command.first == self.numbers.get(command.column, 1), "no number is taken twice"
            self.numbers[command.column] = command.first + command.count
        assert new.identities == self.numbers
        found = {name: (last.sequence, last.seqno, last.upper) for name, last in new.producers.items()}
        assert found == self.produced
        self.check_step(old, new, diff, command)

    def check_placed(self, old: State, new: State, command: c.AppendNow) -> None:
        """It is at one time, which is upper or later, and it is committed once."""
        assert command not in self.placed, "nothing is placed twice"
        self.placed.append(command)
        self.appended.append(command.batch)
        self.committed[command.token, old.upper, new.upper] = self.version.seqno
        time = (new.upper.time or 0) - 1
        assert old.upper.is_before(time)
        assert {(part.time_lower, part.time_upper) for part in new.trace[-1].parts} <= {(time, time)}
        assert new.times is None or time >= command.now * PER_SECOND[new.times] // 1000

    def check_step(self, old: State, new: State, diff: StateDiff, command: c.Command) -> None:
        assert old.since <= new.since
        assert old.upper <= new.upper
        assert old.seqno_since(self.version.seqno) <= new.seqno_since(self.version.seqno)
        for id_ in old.readers.keys() & new.readers.keys():
            assert old.readers[id_].since <= new.readers[id_].since
            assert old.readers[id_].seqno <= new.readers[id_].seqno
            assert old.readers[id_].lease_until <= new.readers[id_].lease_until
        for writer in old.writers.keys() & new.writers.keys():
            assert old.writers[writer].lease_until <= new.writers[writer].lease_until
        linked = {key for batch in (diff.trace.added if diff.trace else ()) for key in batch.keys}
        assert not linked & old.garbage.keys()
        fresh = linked - {key for batch in old.stored for key in batch.keys}  # kept contents may take their place
        if isinstance(command, c.Absorb):
            fresh -= (adopted := {key for key in fresh if is_pending(key)})
            assert not adopted & {key for key, _ in command.absorbed}, "what is adopted is not garbage"
        assert {uploader_of(key) for key in fresh} <= old.writers.keys(), (
            "only what a live writer has uploaded is linked, or a pending batch by its own command"
        )
        assert len(old.trace) < 1 or new.trace[-1].hi >= old.trace[-1].hi
        referred = {key for batch in old.stored for key in batch.keys} | {r.key for r in old.rollups.values()}
        still = {key for batch in new.stored for key in batch.keys} | {r.key for r in new.rollups.values()}
        gone_now = new.garbage.keys() - old.garbage.keys()
        late = {key for key in gone_now - (referred - still) if is_pending(key)}
        assert gone_now - late == referred - still, "exactly what is no longer referred to, and what is pending"
        assert not late or isinstance(command, (c.Absorb, c.DiscardPending))
        assert not late & still, "nothing that is referred to"
        names = [parse_pending_key(key) for key in late]
        assert all(name is not None and name.upper <= new.upper for name in names), "nothing that is still needed"
        self.check_written(old, new, diff)
        forgotten = old.garbage.keys() - new.garbage.keys()
        assert not forgotten & {key for pin in new.pins.values() for key in pin.keys}, "what is pinned is not deleted"
        named = {key for pin in new.pins.values() for key in pin.keys}
        before = {key for pin in old.pins.values() for key in pin.keys}
        assert named <= before | still, "what was not pinned is only pinned while a batch has it"
        gone = (old.writers.keys() | old.readers.keys()) - (new.writers.keys() | new.readers.keys())
        assert gone == new.retired.keys() - old.retired.keys()

    def check_written(self, old: State, new: State, diff: StateDiff) -> None:
        """What appends and compactions wrote is counted, by objects rather than by the trace's own sums."""
        was, is_ = (old.appended_bytes, old.maintained_bytes), (new.appended_bytes, new.maintained_bytes)
        if old.format < 3 or (diff.trace is None and diff.contents is None) or not new.schemas:
            assert was == is_
            return
        before = {part for batch in old.stored for part in batch.parts}
        ahead = [] if new.contents is None else [new.contents]
        added = [part for batch in (*(diff.trace.added if diff.trace else ()), *ahead) for part in batch.parts]
        fresh = sum(part.size for part in added if part.inline is not None or part.key not in {p.key for p in before})
        grown = (is_[0] - was[0], is_[1] - was[1])
        assert grown == ((fresh, 0) if new.upper != old.upper and not new.is_finished() else (0, fresh))


def together(shard: Shard, commands: Commands) -> Sequence[c.Command]:
    """Several commands, most of which fit the state that those before them would leave; now and then one comes twice.

    Now and then some are for another state, as those of clients that know an old one are.
    """
    state, found = shard.state, list[c.Command]()
    for _ in range(commands.random.randrange(1, 9)):
        found.append(commands.any(state, shard.next_seqno))
        if commands.random.random() < 0.1:
            found.append(commands.random.choice(found))
        answer = apply(state, shard.next_seqno, found[-1])
        state = answer if isinstance(answer, State) and commands.random.random() < 0.9 else state
    return found


def history(seed: int, steps: int, sane: float = 0.85) -> Shard:
    shard, commands = Shard(), Commands(Random(seed), sane)
    shard.run(CREATED_12 if seed % 15 == 7 else CREATED if seed % 2 else CREATED_1)
    for _ in range(steps):
        shard.run(commands.any(shard.state, shard.next_seqno))
    return shard
