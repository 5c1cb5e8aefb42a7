"""Why a duty does what it does, and why an object is there: the sentences say what the plans do."""

from __future__ import annotations

import msgspec
import pytest

from persist_lib.core.plan.compaction import Policy
from persist_lib.core.plan.explain import explain, explain_object
from persist_lib.core.state import Batch, Garbage, Hold, Reader, Rollup, State, Version, Writer
from persist_lib.frontier import TOP, at
from persist_lib.ids import PartKey, ReaderId, SeqNo, WriterId
from tests.unit.core.test_look import CALM, NOW, OLD, PART, batch

LIVE = "w0123456789abcdef"
MINE = PartKey(f"{LIVE}/00000000000000ff.parquet")


def changed(**fields: object) -> State:
    return msgspec.structs.replace(CALM, **fields)


def version(state: State, seqno: int = 50) -> Version:
    return Version(SeqNo(seqno), state, bytes(16))


def said(state: State, about: str, seqno: int = 50) -> str:
    found = {one.about: one.says for one in explain(version(state, seqno), NOW, Policy(), 30)}
    assert list(found) == ["leases", "since", "retention", "compaction", "rollups", "garbage", "cost"]
    return found[about]


@pytest.mark.parametrize(
    ("state", "about", "says"),
    [
        (CALM, "leases", "nothing has a lease"),
        (changed(writers={WriterId(LIVE): Writer("ingest", NOW + 5000)}), "leases",
         "1 writers and 0 readers are live; the next lease ends in 5 s"),
        (changed(readers={ReaderId("r"): Reader(at(0), SeqNo(20), NOW - 7000)}), "leases",
         "1 have ended and can be retired; r ended 7 s ago"),
        (CALM, "since", "history is kept from [0] on; nothing needs it, and it moves when a reader or a hold does"),
        (changed(holds={f"h{n}": Hold(at(0)) for n in range(5)}), "since",
         "history is kept from [0] on, for hold h0, hold h1, hold h2 and 2 more"),
        (changed(holds={f"h{n}": Hold(at(0)) for n in range(3)}), "since",
         "history is kept from [0] on, for hold h0, hold h1, hold h2"),
        (CALM, "retention", "there is no policy: all history is kept until something gives it up"),
        (changed(member="c1/0"), "retention", "it is a part of a collection, whose retention counts"),
        (changed(trace=(batch(0, 9), batch(1, 9)), retention=0), "retention",
         "the hold can move to [1], 0 behind the newest time"),
        (changed(trace=(batch(0, 9), batch(1, 9)), retention=0, holds={"retention": Hold(at(1))}), "retention",
         "the hold stands at [1], 0 behind the newest time, where it should"),
        (changed(trace=(batch(0, 0),)), "compaction", "there are no updates"),
        (changed(trace=(batch(0, 9), batch(1, 9)), count=18), "compaction",
         "nothing is due: 2 batches, and at rest there are at most 12; each holds at least 0.5 of what is newer"),
        (changed(trace=(batch(0, 9),), count=9), "compaction",
         "nothing is due: 1 batch, and at rest there are at most 10; each holds at least 0.5 of what is newer"),
        (CALM, "rollups", "none is due: the newest is of v40, 10 transitions ago, and each 30th is due"),
        (changed(garbage={PART: Garbage(SeqNo(45), 7)}), "rollups",
         "one is due: the newest is of v40, 10 transitions ago, and garbage waits for a newer one"),
        (CALM, "garbage", "there is no garbage"),
        (changed(garbage={PART: Garbage(SeqNo(30), 7)}), "garbage", "1 objects of 7 bytes can go now"),
        (changed(garbage={PART: Garbage(SeqNo(45), 7)}), "garbage",
         "1 objects of 7 bytes wait: no rollup beyond v45 yet; the newest is v40"),
        (changed(garbage={PART: Garbage(SeqNo(30), 7)}, readers={ReaderId("r"): Reader(at(0), SeqNo(20), NOW)}),
         "garbage", "1 objects of 7 bytes wait: reader r may still read from v20"),
    ],
)  # fmt: skip
def test_each_duty_says_what_it_would_do_or_what_keeps_it(state: State, about: str, says: str) -> None:
    assert said(state, about) == says


def test_what_is_due_is_told_with_its_price_and_what_a_shard_costs() -> None:
    found = said(changed(trace=(batch(0, 9), batch(1, 90)), count=99), "compaction")
    assert found.startswith("99 of 99 updates are due to be rewritten (1 merge), for $0.0000")
    assert said(CALM, "rollups", seqno=70) == "one is due: the newest is of v40, 30 transitions ago"
    cost = said(changed(garbage={PART: Garbage(SeqNo(30), 7)}, appended_bytes=100, maintained_bytes=150), "cost")
    assert ", 7 of garbage, " in cost
    assert "a month at $0.023 a GiB; compaction wrote 1.50 bytes for each that was appended; " in cost
    assert cost.endswith("; nothing here moves objects to another class of storage"), "why nothing was moved"


def test_a_finished_shard_says_only_that() -> None:
    finished = State(since=TOP, trace=(Batch(0, 1, at(0), TOP, TOP, 0, 0, 0),))
    (why,) = explain(version(finished), NOW, Policy(), 30)
    assert why.says.startswith("it is finished for good")


@pytest.mark.parametrize(
    ("state", "key", "says"),
    [
        (changed(garbage={PART: Garbage(SeqNo(30), 7)}), PART,
         "nothing refers to it since v30, and it can go: the duty garbage deletes it"),
        (changed(garbage={PART: Garbage(SeqNo(45), 7)}), PART,
         "nothing refers to it since v45, and it waits: no rollup beyond v45 yet; the newest is v40"),
        (changed(garbage={PART: Garbage(SeqNo(30), 7)}, readers={ReaderId("r"): Reader(at(0), SeqNo(20), NOW)}), PART,
         "nothing refers to it since v30, and it waits: reader r may still read from v20"),
        (changed(garbage={PART: Garbage(SeqNo(45), 7), OLD: Garbage(SeqNo(45), 7)},
                 readers={ReaderId("r"): Reader(at(0), SeqNo(46), NOW)}), PART,
         "nothing refers to it since v45, and it waits: no rollup beyond v45 yet; the newest is v40"),
        (changed(writers={WriterId(LIVE): Writer("ingest", NOW)}), MINE,
         "nothing refers to it yet; its writer is live, and may link it, or leave it to the duty orphans"),
        (CALM, MINE, "nothing refers to it, and nothing ever can: if it is there, the duty orphans deletes it"),
        (CALM, "photo.jpg", "it is no key of an object of this shard, as in w1…/….parquet"),
    ],
)  # fmt: skip
def test_an_object_says_why_it_is_still_there(state: State, key: str, says: str) -> None:
    assert explain_object(version(state), key) == (key, says)


def test_what_states_refer_to_is_named() -> None:
    rolled = dict(CALM.rollups)
    newest = rolled[CALM.newest_rollup]
    older = Rollup(PartKey("rollup/v00000000000000000020-00000000000000aa"), 5, b"")
    state = changed(rollups={**rolled, SeqNo(20): older})
    assert explain_object(version(state), newest.key).says == "it is the rollup of v40, the newest"
    assert explain_object(version(state), older.key).says == ("it is the rollup of v20, which a newer one replaces")
