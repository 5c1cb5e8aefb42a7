"""Every interleaving of writers that only have conditional PUTs, as a small model of `events.stores.objects`.

Nothing acknowledged is lost, and each rule is needed.

Writer 0 runs already, in epoch 1. The others may take over at any time. Each may stop for ever at any step, which is a
crash, or continue however late, which is a pause; and what it has sent may arrive at any later time, or never. A writer
sends several events before it hears of the first. With fragments, each event is two records, of which fragment 0 is
sent when the others of the batch have arrived.

    store   for each id, and each fragment: None, or (epoch, kind, epoch of the event before), kind E, F (fence), f (1)
    sent    (writer, place, record, the record that must be there or None)
    acked   for each id the epoch in which it was acknowledged, 0: not

As an epoch writes an id once, (epoch, id) stands for the bytes, the digest and the version of a record. What must hold:

    G1  what was acknowledged is in the log, as a reader finds it, for ever
    G2  the log only grows: no event in it goes away, or becomes another one
    G3  each event in the log has all of its fragments, of its own epoch
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest

Record = tuple[int, str, int]
Place = tuple[int, int]
Out = tuple[tuple[int, int, str, Record | None], ...]
MUTANTS = (
    "no_fence", "fence_replaces_what_it_finds", "replace_whatever_is_there", "replace_any_epoch", "fragment_0_first",
    "no_chain", "acknowledge_out_of_order", "walk_before_claim",
    "walk_onto_newer",
)  # fmt: skip


class Broken(Exception):
    """An invariant does not hold."""


class Writer(NamedTuple):
    """`at`: new, walk, fence, look (at what is where the fence was to be), run, over. `out`: what is under way."""

    at: str = "new"
    epoch: int = 0
    last: int = 0
    last_epoch: int = 0
    expects: Record | None = None
    out: Out = ()
    """(id, fragment, put | wait | look | done, the record that must be there)."""
    acked: int = 0


class State(NamedTuple):
    """All that there is."""

    store: tuple[Record | None, ...]
    claims: int
    writers: tuple[Writer, ...]
    sent: frozenset[tuple[int, Place, Record, Record | None]]
    acked: tuple[int, ...]


class Model:
    """`ids` events at most, `fragments` of each, so many `writers`, `window` events under way. `lossy`: answers too."""

    def __init__(
        self, writers: int, ids: int, fragments: int, window: int, mutant: str | None = None, *, lossy: bool = False
    ) -> None:
        self.writers, self.ids, self.fragments, self.window = writers, ids, fragments, window
        self.mutant, self.lossy = mutant, lossy

    def first(self) -> State:
        """Writer 0 runs, and nothing was written. Its own fence is at 1."""
        store: list[Record | None] = [None] * (self.ids * self.fragments)
        fence = (1, "F", 0)
        store[self.index((1, 0))] = fence
        writers = (Writer("run", 1, 0, 0, fence), *[Writer()] * (self.writers - 1))
        return State(tuple(store), 1, writers, frozenset(), (0,) * (self.ids + 1))

    def index(self, place: Place) -> int:
        """Where a place is in the store."""
        return (place[0] - 1) * self.fragments + place[1]

    def log(self, store: tuple[Record | None, ...]) -> tuple[int, ...]:
        """The epochs of the events that a reader finds."""
        found: list[int] = []
        before = 0
        for id_ in range(1, self.ids + 1):
            record = store[self.index((id_, 0))]
            if record is None or record[1] != "E":
                break
            if self.mutant != "no_chain" and (record[2] != before or record[0] < before):
                break
            before = record[0]
            found.append(before)
        return tuple(found)

    def check(self, before: State, after: State) -> None:
        """Raise Broken if an invariant does not hold."""
        log = self.log(after.store)
        for id_, epoch in enumerate(after.acked):
            if epoch and (len(log) < id_ or log[id_ - 1] != epoch):
                raise Broken(f"G1 event {id_} of epoch {epoch} was acknowledged, and the log is {log}")
        if log[: len(known := self.log(before.store))] != known:
            raise Broken(f"G2 the log was {known} and is {log}")
        for id_, epoch in enumerate(log, 1):
            for fragment in range(1, self.fragments):
                record = after.store[self.index((id_, fragment))]
                if record is None or record[0] != epoch:
                    raise Broken(f"G3 fragment {fragment} of event {id_} of epoch {epoch} is {record}")

    def explore(self) -> int:
        """Look at every state that can be reached. Returns how many there are."""
        seen = {self.first()}
        left = [*seen]
        while left:
            state = left.pop()
            for after in self.steps(state):
                if after not in seen:
                    self.check(state, after)
                    seen.add(after)
                    left.append(after)
        return len(seen)

    def steps(self, state: State) -> Iterator[State]:
        """What can happen next."""
        for message in state.sent:
            yield self.arrive(state, message)
            if self.lossy:
                yield self.arrive(state, message, is_answered=False)
        for number, writer in enumerate(state.writers):
            yield from self.act(state, number, writer)

    def arrive(
        self, state: State, message: tuple[int, Place, Record, Record | None], *, is_answered: bool = True
    ) -> State:
        """A PUT arrives, and its sender hears whether its condition held.

        If the answer is lost, the sender looks at what is there, and what it sent may arrive a second time.
        """
        number, place, record, expects = message
        holds = state.store[self.index(place)] == expects
        if self.mutant == "replace_whatever_is_there" and expects is not None:
            holds = True
        store = state.store
        if holds:
            at = self.index(place)
            store = (*store[:at], record, *store[at + 1 :])
        writer, holds = state.writers[number], holds and is_answered
        if record[1] != "F":
            heard = "done" if holds else "look"
            waits = *place, "wait", None
            writer = writer._replace(out=tuple((*place, heard, None) if one == waits else one for one in writer.out))
        elif writer.at == "wait":
            writer = self.fenced(writer) if holds else writer._replace(at="look")
        sent = state.sent - {message} if is_answered else state.sent
        return self.with_writer(state._replace(store=store, sent=sent), number, writer)

    def fenced(self, writer: Writer) -> Writer:
        """The fence stands: this writer may write. Its first event replaces the fence."""
        return writer._replace(at="run", expects=(writer.epoch, "F", writer.last_epoch), acked=writer.last)

    def with_writer(self, state: State, number: int, writer: Writer) -> State:
        """The state with another writer there."""
        return state._replace(writers=(*state.writers[:number], writer, *state.writers[number + 1 :]))

    def act(self, state: State, number: int, writer: Writer) -> Iterator[State]:
        """What a writer does next."""
        match writer.at:
            case "new":
                if self.mutant == "walk_before_claim":
                    log = self.log(state.store)
                    writer = writer._replace(at="claim", last=len(log), last_epoch=log[-1] if log else 0)
                    yield self.with_writer(state, number, writer)
                else:
                    claimed = writer._replace(at="walk", epoch=state.claims + 1)
                    yield self.with_writer(state._replace(claims=state.claims + 1), number, claimed)
            case "claim":
                claimed = writer._replace(at="run", epoch=state.claims + 1, acked=writer.last)
                yield self.with_writer(state._replace(claims=state.claims + 1), number, claimed)
            case "walk":
                yield self.with_writer(state, number, self.walk(state, writer))
            case "fence":
                place, fence = (writer.last + 1, 0), (writer.epoch, "F", writer.last_epoch)
                sent = state.sent | {(number, place, fence, writer.expects)}
                yield self.with_writer(state._replace(sent=sent), number, writer._replace(at="wait"))
            case "look":
                yield self.with_writer(state, number, self.look(state, writer))
            case "run":
                yield from self.run(state, number, writer)
            case _:
                pass

    def is_next(self, writer: Writer, record: Record | None) -> bool:
        """Whether what is behind the last event is an event that follows it."""
        return (
            record is not None and record[1] == "E"
            and (self.mutant == "no_chain" or (record[2] == writer.last_epoch and record[0] >= writer.last_epoch))
        )  # fmt: skip

    def there(self, state: State, writer: Writer) -> Record | None:
        """What is behind the last event that a writer knows of."""
        return state.store[self.index((writer.last + 1, 0))] if writer.last < self.ids else None

    def walk(self, state: State, writer: Writer) -> Writer:
        """Look at the place behind the last event, before the fence."""
        if writer.last == self.ids:
            return writer._replace(at="over")
        record = self.there(state, writer)
        if record is not None and record[0] > writer.epoch and self.mutant != "walk_onto_newer":
            return writer._replace(at="over")
        if self.is_next(writer, record) and record is not None:
            return writer._replace(last=writer.last + 1, last_epoch=record[0])
        if self.mutant == "no_fence":
            return writer._replace(at="run", acked=writer.last)
        return writer._replace(at="fence", expects=None)

    def look(self, state: State, writer: Writer) -> Writer:
        """The fence was refused: look at what is there."""
        record = self.there(state, writer)
        if record == (writer.epoch, "F", writer.last_epoch):
            return self.fenced(writer)
        if record is not None and record[0] > writer.epoch:
            return writer._replace(at="over")
        if self.is_next(writer, record) and record is not None and self.mutant != "fence_replaces_what_it_finds":
            last = writer.last + 1
            at = "over" if last == self.ids else "fence"
            return writer._replace(at=at, last=last, last_epoch=record[0], expects=None)
        return writer._replace(at="fence", expects=record)

    def run(self, state: State, number: int, writer: Writer) -> Iterator[State]:
        """Write, hear, acknowledge."""
        if writer.out and all(one[2] == "done" for one in writer.out):
            yield self.with_writer(self.acknowledge(state, writer), number, self.after_phase(writer))
            return
        if not writer.out and writer.last < self.ids:
            for many in range(1, min(self.window, self.ids - writer.last) + 1):
                fragment = 1 if self.fragments > 1 and self.mutant != "fragment_0_first" else 0
                out: Out = tuple((writer.last + at, fragment, "put", None) for at in range(1, many + 1))
                if fragment == 0:
                    out = ((*out[0][:3], writer.expects), *out[1:])
                yield self.with_writer(state, number, writer._replace(out=out))
        for at, (id_, fragment, how, expects) in enumerate(writer.out):
            place = id_, fragment
            if how == "put":
                sent = state.sent | {(number, place, self.record(writer, place), expects)}
                yield self.with_writer(state._replace(sent=sent), number, self.heard(writer, at, "wait", None))
            elif how == "look":
                found = state.store[self.index(place)]
                if found == self.record(writer, place):
                    yield self.with_writer(state, number, self.heard(writer, at, "done", None))
                elif found is not None and found[0] > writer.epoch and self.mutant != "replace_any_epoch":
                    yield self.with_writer(state, number, writer._replace(at="over", out=()))
                else:
                    yield self.with_writer(state, number, self.heard(writer, at, "put", found))

    def record(self, writer: Writer, place: Place) -> Record:
        """What a writer puts at a place."""
        before = writer.last_epoch if place[0] == writer.last + 1 else writer.epoch
        return writer.epoch, "f" if place[1] else "E", before

    def heard(self, writer: Writer, at: int, how: str, expects: Record | None) -> Writer:
        """The writer with one record of what is under way changed."""
        id_, fragment, _, _ = writer.out[at]
        return writer._replace(out=(*writer.out[:at], (id_, fragment, how, expects), *writer.out[at + 1 :]))

    def last_fragment(self) -> int:
        """The fragment that is put last."""
        return 1 if self.mutant == "fragment_0_first" and self.fragments > 1 else 0

    def after_phase(self, writer: Writer) -> Writer:
        """All of a batch's fragments of one kind are there: continue to the others, or to the next batch."""
        fragment = writer.out[0][1]
        if fragment != self.last_fragment():
            out: Out = tuple((id_, self.last_fragment(), "put", None) for id_, *_ in writer.out)
            if self.last_fragment() == 0:
                out = ((*out[0][:3], writer.expects), *out[1:])
            return writer._replace(out=out)
        last = writer.out[-1][0]
        return writer._replace(out=(), last=last, last_epoch=writer.epoch, expects=None, acked=last)

    def acknowledge(self, state: State, writer: Writer) -> State:
        """Note what the writer's program is told."""
        if writer.out[0][1] != self.last_fragment():
            return state
        acked = list(state.acked)
        for id_, *_ in writer.out:
            acked[id_] = writer.epoch
        return state._replace(acked=tuple(acked))


class Eager(Model):
    """The mutant that acknowledges each event when it is there, whether those before it are or not."""

    def arrive(
        self, state: State, message: tuple[int, Place, Record, Record | None], *, is_answered: bool = True
    ) -> State:
        after = super().arrive(state, message, is_answered=is_answered)
        number, (id_, fragment), record, _ = message
        if record[1] != "E" or fragment or after.store[self.index((id_, 0))] != record:
            return after
        if not any(one[:3] == (id_, 0, "done") for one in after.writers[number].out):
            return after
        return after._replace(acked=(*after.acked[:id_], record[0], *after.acked[id_ + 1 :]))


def model(
    writers: int, ids: int, fragments: int, window: int, mutant: str | None = None, *, lossy: bool = False
) -> Model:
    """The model, or a mutant of it."""
    kind = Eager if mutant == "acknowledge_out_of_order" else Model
    return kind(writers, ids, fragments, window, mutant, lossy=lossy)


# Writers, events, fragments of each, events under way.
SMALL = [(2, 2, 1, 2), (2, 2, 2, 2), (2, 3, 1, 3), (3, 2, 1, 2)]
LARGE = [(3, 2, 2, 2), (3, 3, 1, 2), (2, 3, 2, 3)]


IS_ALL = os.environ.get("PERSIST_EVENTS") == "all"
LOSSY = [(2, 1, 2, 1)]
LOSSY_LARGE = [(2, 2, 1, 2), (2, 2, 2, 1)]


@pytest.mark.parametrize("size", SMALL + LARGE * IS_ALL)
def test_nothing_acknowledged_is_lost_and_the_log_only_grows(size: tuple[int, int, int, int]) -> None:
    assert model(*size).explore() > 500


@pytest.mark.parametrize("size", LOSSY + LOSSY_LARGE * IS_ALL)
def test_nor_where_answers_are_lost_and_what_was_sent_arrives_twice(size: tuple[int, int, int, int]) -> None:
    assert model(*size, lossy=True).explore() > 500


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_rule_is_needed(mutant: str) -> None:
    for size in (SMALL[0], SMALL[1], SMALL[3]):
        try:
            model(*size, mutant).explore()
        except Broken:
            return
    raise AssertionError(f"without the rule, nothing breaks: {mutant}")
