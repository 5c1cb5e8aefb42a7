"""Random commands for a state: mostly sensible, often not. Everything is drawn from one `Random`, so it repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from msgspec.structs import replace

from persist_lib.core import commands as c
from persist_lib.core.formats import PART_SUMS, PINS
from persist_lib.core.holds import layer_of
from persist_lib.core.identities import END, counting, next_of
from persist_lib.core.members import inheritance
from persist_lib.core.pending import PendingName
from persist_lib.core.state import Batch, Part, Rollup, State
from persist_lib.core.sums import Sums
from persist_lib.format.paths import part_key, rollup_key
from persist_lib.frontier import MAX_TIME, MINIMUM, TOP, Antichain, at
from persist_lib.ids import PUBLISHED, PartKey, ReaderId, SeqNo, WriterId, format_reader_id, format_writer_id
from persist_lib.schema.schema import Schema

IDS = 5
KEYS = 12


class Commands:
    """Makes commands for whatever state it is shown. `sane` is the share of draws that try to be accepted."""

    def __init__(self, random: Random, sane: float = 0.85) -> None:
        self.random = random
        self.sane = sane

    def is_sane(self) -> bool:
        return self.random.random() < self.sane

    def writer(self, state: State) -> WriterId:
        if state.writers and self.is_sane():
            return self.random.choice(sorted(state.writers))
        return self.random.choice([format_writer_id(self.random.randrange(IDS)), WriterId("x"), WriterId("w12/..")])

    def reader(self, state: State) -> ReaderId:
        if state.readers and self.is_sane():
            return self.random.choice(sorted(state.readers))
        return self.random.choice([format_reader_id(self.random.randrange(IDS)), ReaderId("")])

    def new_writer(self) -> WriterId:
        return format_writer_id(self.random.getrandbits(64)) if self.is_sane() else self.writer(State())

    def new_reader(self) -> ReaderId:
        return format_reader_id(self.random.getrandbits(64)) if self.is_sane() else self.reader(State())

    def time(self) -> int:
        if self.is_sane():
            return self.random.randrange(200)
        return self.random.choice([0, 1, MAX_TIME - 1, MAX_TIME, self.random.getrandbits(64)])

    def frontier(self, least: Antichain = MINIMUM) -> Antichain:
        if self.random.random() < 0.006:
            return TOP
        if self.is_sane():
            return at(min(MAX_TIME, (least.time or 0) + self.random.randrange(30)))
        return at(self.time())

    def lease(self) -> int:
        return self.random.randrange(2000)

    def key(self, writer: str) -> PartKey:
        return part_key(WriterId(writer), self.random.randrange(KEYS) if self.random.random() < 0.4 else
                        self.random.getrandbits(64))  # fmt: skip

    def part(self, writer: str, lower: Antichain, upper: Antichain) -> Part:
        low = lower.time or 0
        high = low + 50 if upper.time is None else max(low, upper.time - 1)
        first = self.random.randint(low, min(high, MAX_TIME)) if self.is_sane() else self.time()
        last = self.random.randint(first, max(first, min(high, MAX_TIME))) if self.is_sane() else self.time()
        rows = self.random.randint(1, 100) if self.is_sane() else self.random.randint(-1, 3)
        size = self.random.randint(1, 400_000 if self.random.random() < 0.02 else 400)
        inline = bytes(size) if self.random.random() < 0.4 else None
        digests = bytes(16) if self.is_sane() or self.is_sane() else b""
        key = PartKey("") if inline is not None else self.key(writer)
        found = Part(key, size, rows, digests, b"a", b"b", first, last, 0 if self.is_sane() else 1, inline)
        if self.random.random() < 0.8:
            return found
        found = replace(found, time_upper=first, earliest=max(0, rows), at=first)
        return found if self.is_sane() else replace(found, at=self.time(), earliest=self.random.randrange(3))

    def batch(self, writer: str, lower: Antichain, upper: Antichain, since: Antichain = MINIMUM) -> Batch:
        parts = tuple(self.part(writer, lower, upper) for _ in range(self.random.choice([0, 1, 1, 1, 2])))
        count = sum(part.rows for part in parts)
        runs = tuple(range(len(parts))) if self.is_sane() else (0,) * self.random.randrange(2)
        sums = (self.random.randint(-5, 5), self.random.getrandbits(64)) if parts or not self.is_sane() else (0, 0)
        exact = self.random.random() < 0.9
        if not exact and self.is_sane() and count > 1:
            count -= 1
        return Batch(0, 1, lower, upper, since, count, *sums, parts, runs, exact)

    def uploaded_by_others(self, state: State, batch: Batch) -> Batch:
        """Now and then one of its objects is of another live writer, of a retired one, or of one never heard of."""
        places = [place for place, part in enumerate(batch.parts) if part.inline is None]
        if not places or self.random.random() < 0.85:
            return batch
        retired = sorted(id_ for id_ in state.retired if id_.startswith("w"))
        kinds: list[Sequence[str]] = [sorted(state.writers), retired, [format_writer_id(self.random.getrandbits(64))]]
        uploader = self.random.choice(self.random.choice([ids for ids in kinds if ids]))
        place = self.random.choice(places)
        other = replace(batch.parts[place], key=self.key(uploader))
        return replace(batch, parts=(*batch.parts[:place], other, *batch.parts[place + 1 :]))

    def append(self, state: State) -> c.Command:
        writer = self.writer(state)
        lower = state.upper if self.is_sane() else self.frontier()
        kind = c.CompareAndAppend if self.random.random() < 0.6 else c.Append
        if kind is c.Append and self.random.random() < 0.4 and lower.time:
            lower = at(self.random.randrange(lower.time))
        upper = self.frontier(state.upper)
        batch = self.batch(writer, state.upper if self.is_sane() else lower, upper)
        batch = Batch(0, 1, lower, upper, batch.since, batch.count, batch.diff_sum, batch.fingerprint, batch.parts,
                      batch.runs, batch.exact)  # fmt: skip
        token = bytes([self.random.randrange(256), self.random.randrange(2)])
        batch = self.uploaded_by_others(state, batch)
        if kind is c.CompareAndAppend and self.random.random() < 0.4:
            return c.CompareAndAppend(
                writer, token, batch, self.lease(), self.producer(state), self.random.randrange(9)
            )
        return kind(writer, token, batch, self.lease())

    def append_now(self, state: State) -> c.Command:
        """Made from the newest version, or from one that is so old that the state may not remember all since then."""
        writer = self.writer(state)
        time = at(self.random.choice([0, state.upper.time or 0, self.random.randrange(300)]))
        batch = self.batch(writer, time, at(min(MAX_TIME, (time.time or 0) + 1)))
        batch = replace(self.uploaded_by_others(state, batch), lower=MINIMUM)
        newest = state.outcomes[-1].seqno if state.outcomes else 0
        since = newest if self.is_sane() else self.random.randint(0, newest + 1)
        producer = self.producer(state) if self.random.random() < 0.2 else None
        token = bytes([self.random.randrange(256), 3])
        return c.AppendNow(writer, token, batch, self.lease(), SeqNo(since), producer, self.random.randrange(400))

    def producer(self, state: State) -> tuple[str, int]:
        name = self.random.choice(["query", "load", "☃"])
        last = state.producers.get(name)
        if self.is_sane():
            return name, self.random.randint(0, 3) + (0 if last is None else last.sequence)
        names = ["", "a\0b", "x" * 201, "\ud800", name]
        return self.random.choice(names), self.random.choice([-1, 0, 2**63 - 1, 2**63, True])

    def pending_name(self, lower: Antichain, upper: Antichain, count: int) -> PendingName:
        name = PendingName(self.random.choice("ab"), lower.time or 0, upper, count, "0" * 32)
        if self.is_sane():
            return name
        return replace(
            name, lower=self.random.randrange(200), upper=self.frontier(lower), count=self.random.randrange(3)
        )

    def absorb(self, state: State) -> c.Command:
        """One or two pending batches, rewritten or adopted, and what another writer put for the same times."""
        lower = state.upper if self.is_sane() else self.frontier()
        middle, last = (at(min(MAX_TIME, (lower.time or 0) + step)) for step in (3, 3 + self.random.randrange(1, 9)))
        writer, token = self.writer(state), bytes([self.random.randrange(256), 2])
        names = [self.pending_name(lower, middle, 2), self.pending_name(middle, last, 0)]
        if self.random.random() < 0.5:
            part = Part(names[0].key, 9, 2, bytes(16), b"a", b"b", lower.time or 0, lower.time or 0, 0)
            batch = Batch(0, 1, lower, last, MINIMUM, 2, 0, self.random.getrandbits(64), (part,), (0,))
            names = names[1:]
        else:
            batch = self.batch(writer, lower, last)
        names += [replace(self.pending_name(lower, last, 2), writer="c")] * (self.random.random() < 0.3)
        return c.Absorb(writer, token, batch, tuple((name.key, 9) for name in names), self.lease())

    def discard(self, state: State) -> c.Command:
        upper = self.random.randrange(1, 2 + min(200, state.upper.time or 199))
        names = [
            self.pending_name(at(self.random.randrange(upper)), at(upper), 1) for _ in range(self.random.randrange(3))
        ]
        known = [key for batch in state.trace for key in batch.keys] + sorted(state.garbage)
        keys = [name.key for name in names] if self.is_sane() or not known else [self.random.choice(known)]
        return c.DiscardPending(tuple((key, 7) for key in keys))

    def compaction(self, state: State) -> c.Command:
        worker = self.writer(state)
        if not state.trace:
            return c.ApplyCompaction(worker, ((0, 1),), self.batch(worker, MINIMUM, at(5)))
        start = self.random.randrange(len(state.trace))
        end = self.random.randint(start + 1, min(len(state.trace), start + 4))
        gone = state.trace[start:end]
        ids = tuple(batch.id for batch in gone) if self.is_sane() else ((0, 1), (1, 2), (0, 1))
        lower, upper, since = gone[0].lower, gone[-1].upper, state.since if self.is_sane() else self.frontier()
        output = self.uploaded_by_others(state, self.batch(worker, lower, upper, since))
        kept = tuple(part for batch in gone for part in batch.parts) if self.random.random() < 0.5 else output.parts
        count = sum(batch.count for batch in gone) if kept != output.parts else output.count
        sums = sum(b.diff_sum for b in gone), sum(b.fingerprint for b in gone) % 2**64
        if self.random.random() < 0.1:
            sums = (sums[0] + 1, sums[1])
        exact = all(batch.exact for batch in gone) if kept != output.parts else output.exact
        runs = tuple(range(len(kept)))
        return c.ApplyCompaction(worker, ids, Batch(0, 1, lower, upper, since, count, *sums, kept, runs, exact))

    def contents(self, state: State) -> c.Command:
        """What the first batches come to; or that they are taken in their place."""
        worker, kept = self.writer(state), state.contents
        if kept is not None and self.random.random() < 0.4:
            gone = tuple(batch for batch in state.trace if batch.hi <= kept.hi)
            output = replace(kept, since=max([state.since.meet(kept.upper), *(batch.since for batch in gone)]))
            return c.ApplyCompaction(worker, tuple(batch.id for batch in gone), output)
        ends = [batch for batch in state.trace if batch.upper.time]
        if not ends or self.random.random() < 0.1:
            return c.KeepContents(worker, None)
        end = self.random.choice(ends[-3:])
        gone = tuple(batch for batch in state.trace if batch.hi <= end.hi)
        time = (end.upper.time or 1) - 1 if self.is_sane() else self.time()
        part = replace(self.part(worker, at(time), TOP), at=None, earliest=0, time_lower=time, time_upper=time)
        if part.inline is not None and self.is_sane():
            part = replace(part, key=self.key(worker), inline=None)
        if part.inline is None and self.random.random() < (0.5 if state.format >= PINS else 0.02):
            part = replace(part, key=PartKey(f"{PUBLISHED}/{part.key}"))
        kinds = [(part,), kept.parts if kept is not None else (part,)]
        parts = self.random.choice(kinds) if any(batch.count for batch in gone) else ()
        parts = tuple(replace(one, rows=1) for one in parts[:1]) if kept is None or parts != kept.parts else parts
        if kept is not None and parts == kept.parts and self.is_sane():
            parts = ()
        sums = sum(b.diff_sum for b in gone), sum(b.fingerprint for b in gone) % 2**64
        count = sum(one.rows for one in parts)
        if self.random.random() < 0.1:
            sums = (sums[0] + 1, sums[1])
        if len(parts) == 1 and self.random.random() < (0.5 if state.format >= PART_SUMS else 0.02):
            said = Sums(count, *sums) if self.is_sane() else Sums(count, 1, 1)
            earlier = {"time_lower": max(0, time - 1), "time_upper": max(0, time - 1)} if self.is_sane() else {}
            parts = (replace(parts[0], sums=said, **earlier),)
        runs = (0,) if parts else ()
        batch = Batch(0, end.hi, MINIMUM, end.upper, at(time), count, *sums, parts, runs)
        return c.KeepContents(worker, self.uploaded_by_others(state, batch))

    def pins(self, state: State) -> c.Command:
        """Keys that are in batches, that are pinned, or that are garbage."""
        name = self.random.choice(["a", "b", "a b"] if not self.is_sane() else ["a", "b"])
        known = state.pins.get(name)
        expected = (known.opaque if known else None) if self.is_sane() else b"other"
        if expected is not None and self.random.random() < 0.3:
            return c.Unpin(name, expected)
        keys = {key for batch in state.stored for key in batch.keys} | set(known.keys if known else ())
        keys |= set() if self.is_sane() else {*state.garbage, PartKey("w/1")}
        some = tuple(key for key in sorted(keys) if self.random.random() < 0.7)
        keep = self.random.choice([0, 0, 5] if self.is_sane() else [-1, 5000])
        return c.PinKeys(
            name, some, expected, self.random.choice([b"x", b"y"]), self.random.choice([None, 7]), keep, keep > 0
        )

    def maintenance(self, state: State, seqno: SeqNo) -> c.Command:
        at_ = SeqNo(self.random.randint(max(1, seqno - 20), seqno + 1))
        rollup = Rollup(rollup_key(at_, self.random.randrange(3)), 1000, bytes(16))
        garbage = sorted(state.garbage) or [PartKey("w/1")]
        retired = sorted(state.retired) or ["w"]
        choices: list[c.Command] = [
            c.AddRollup(self.writer(state), at_, rollup),
            c.ForgetGarbage(tuple(self.random.choices(garbage, k=self.random.randrange(3)))),
            c.ForgetRetired(tuple(self.random.choices(retired, k=self.random.randrange(3)))),
            c.Expire(self.random.randrange(800)),
            c.Upgrade(self.random.choice([1, 2, 2, 2, 3, 4, 5, 6, 7, 7])),
            self.adopt(state, seqno),
            c.EvolveSchema(self.random.randrange(3), self.schema(len(state.schemas) if self.is_sane() else 2)),
        ]  # fmt: skip
        return self.random.choice(choices)

    def holders(self, state: State, seqno: SeqNo) -> c.Command:
        hold = self.random.choice(["a", "b", "retention"])
        known = state.holds.get(hold)
        expected = (known.opaque if known else None) if self.is_sane() else b"other"
        seqno_held = SeqNo(self.random.randrange(seqno + 3))
        choices: list[c.Command] = [
            c.RegisterWriter(self.new_writer(), self.random.choice(["ingest", "maintenance"]), self.lease()),
            c.RegisterWriter(
                self.new_writer(), "ingest", self.lease(), self.random.choice(["", "owner"]), layer_of(state)
            ),
            c.CloneReader(self.new_reader(), self.reader(state), self.lease(), "clone"),
            c.RegisterReader(self.new_reader(), self.lease(), self.random.choice(["", "test"])),
            c.Heartbeat((self.writer(state), self.reader(state), self.writer(state)), self.lease()),
            c.DowngradeSince(self.reader(state), self.frontier(state.since), seqno_held, self.lease()),
            c.SetHold(hold, self.frontier(state.since), expected, self.random.choice([b"x", b"y"])),
            c.DowngradeHold(hold, self.frontier(state.since), expected, self.random.choice([b"x", b"y", b"stream"])),
            c.ReleaseHold(hold, expected or b""),
            c.ForgetProducer(*self.producer(state)),
            c.SetRetention(self.random.choice([None, 0, 5, -1, MAX_TIME + 1]), self.random.choice(["", "", "catalog"])),
            c.Retire(self.random.choice([self.writer(state), self.reader(state)])),
        ]  # fmt: skip
        return self.random.choice(choices)

    def adopt(self, state: State, seqno: SeqNo) -> c.Command:
        """Rarely: from then on, commands that do not name the member are refused."""
        if self.random.random() < 0.7 and self.is_sane():
            return inheritance(state, b"taken over", state.upper)
        return c.Adopt("c1/1" if self.is_sane() else "c1", SeqNo(seqno - self.random.choice([0, 0, 0, 1])))

    def numbers(self, state: State) -> c.Command:
        """A range of numbers; now and then one that was taken, an empty one, or of no such column."""
        column = self.random.choice(counting(state)) if self.is_sane() else "v0"
        first = next_of(state, column) if self.is_sane() else self.random.choice([0, 1, next_of(state, column) + 1])
        most = END - first if self.random.random() < 0.02 else self.random.randint(1, 2000)
        return c.Reserve(column, first, most if self.is_sane() else self.random.choice([0, -1, END]))

    def schema(self, columns: int) -> Schema:
        return Schema(key={"id": "int64"}, value={f"v{i}": "int64" for i in range(columns)})

    def any(self, state: State, seqno: SeqNo) -> c.Command:
        """One command; appends most often."""
        makers: list[Callable[[], c.Command]] = [
            lambda: self.append(state), lambda: self.append(state), lambda: self.append(state),
            lambda: self.append_now(state),
            lambda: self.absorb(state) if self.random.random() < 0.7 else self.discard(state),
            lambda: self.compaction(state), lambda: self.maintenance(state, seqno), lambda: self.holders(state, seqno),
            lambda: self.holders(state, seqno),
            lambda: self.contents(state) if self.random.random() < 0.5 else self.pins(state),
        ]  # fmt: skip
        if self.random.random() < 0.01:
            return c.Finish() if self.random.random() < 0.5 else c.Create(self.schema(0), self.random.randrange(5))
        is_counted = bool(counting(state)) and self.random.random() < 0.15
        found = self.numbers(state) if is_counted else self.random.choice(makers)()
        return replace(found, member=state.member) if isinstance(found, c.NamesMember) and self.is_sane() else found
