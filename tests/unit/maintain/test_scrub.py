"""A scrub remembers in the location what it found. No mark of damage is ever lost, and nothing is claimed unread."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from random import Random

import msgspec
import pytest

import persist_lib as persist
from persist_lib.errors import Corrupt, Determinate
from persist_lib.format.paths import MARKS, has_damage, marks_key, marks_prefix
from persist_lib.format.scrub_marks import MARKS_FORM, Mark, Marks
from persist_lib.ids import NAME, SeqNo, ShardId
from persist_lib.location import open_location
from persist_lib.location.memory.location import MemoryConsensus
from persist_lib.location.wrap.around import Operation
from persist_lib.maintain import Scrubbed, known_damage
from persist_lib.maintain.scrub_memory import recall
from persist_lib.testing import Fate, Outcome, check_swept
from tests.framing import framed
from tests.shards import EAGER, TINY, filled
from tests.worlds import SCHEMA, World, row

S = ShardId("s")


def marks_of(world: World) -> list[str]:
    return sorted(entry.key for entry in world.inner.blob.list(marks_prefix(S)))


def put(world: World, key: str, data: bytes) -> None:
    world.inner.blob.delete(key)
    world.inner.blob.set(key, data)


def damage(client: persist.Client, world: World, lo: int) -> tuple[str, bytes]:
    """Flip a bit of the batch that starts at `lo`. Returns the key, and what it held."""
    [batch] = [batch for batch in client.inspect("s").state.trace if batch.lo == lo]
    key = f"s/{batch.parts[0].key}"
    data = world.inner.blob.get(key)
    assert data
    put(world, key, data[:-1] + bytes([data[-1] ^ 1]))
    return key, data


def append(client: persist.Client, time: int) -> None:
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(1, time=time)], time, time + 1)


def test_damage_is_found_again_by_each_scrub_until_it_is_mended_and_the_sentence_says_since_when(world: World) -> None:
    client = world.client(TINY)
    filled(client, 6)
    key, data = damage(client, world, 3)
    found = client.scrub("s", new_only=True)
    assert [id_ for id_, _ in found.damaged] == [(3, 4)]
    assert (found.batches, found.left, found.known, found.remembered) == (6, 0, (), True)
    first = found.since[0]
    for _ in range(2):
        world.clock.advance(3600)
        again = client.scrub("s", new_only=True)
        assert [id_ for id_, _ in again.damaged] == [(3, 4)]
        assert (again.batches, again.left, again.known, again.since) == (1, 5, ((3, 4),), (first,))
        assert "known since " in again.says
        assert " UTC)" in again.says
        assert "is right" not in again.says
    after = client.scrub("s", after=client.inspect("s").seqno)
    assert after.known == ((3, 4),), "known damage is read whatever was asked for"
    assert (after.batches, after.left) == (1, 5)
    put(world, key, data)
    mended = client.scrub("s", new_only=True)
    assert (mended.damaged, mended.mended, mended.gone, mended.batches) == ((), ((3, 4),), (), 1)
    assert "batch (3, 4) was damaged and is mended" in mended.says
    rest = client.scrub("s", new_only=True)
    assert (rest.batches, rest.left, rest.mended) == (0, 6, ())
    assert rest.says == "nothing new: no batch was read; 6 were found right by earlier scrubs"


def test_another_client_in_another_process_knows_the_damage_too(tmp_path: Path) -> None:
    with persist.open(f"file:{tmp_path}/data", config=TINY) as client:
        filled(client, 4)
        [part] = list((tmp_path / "data/blob/s").rglob("*.parquet"))[:1]
        part.write_bytes(part.read_bytes()[:-1])
        assert len(client.scrub("s").damaged) == 1
    with persist.open(f"file:{tmp_path}/data", create=False) as other:
        again = other.scrub("s", new_only=True)
        assert (again.batches, len(again.damaged), len(again.known), again.left) == (1, 1, 1, 3)


def test_the_sentence_claims_only_what_was_read(world: World) -> None:
    client = world.client(TINY)
    client.open_writer("s", SCHEMA).close()
    assert client.scrub("s").says == "nothing was read: the shard is empty"
    append(client, 0)
    assert client.scrub("s").says == "1 batch read: every digest and every sum is right"
    append(client, 1)
    found = client.scrub("s", new_only=True)
    assert found.says == "1 batch read: every digest and every sum is right; 1 were found right by earlier scrubs"
    append(client, 2)
    seqno = client.inspect("s").seqno
    skipped = client.scrub("s", after=seqno)
    assert (skipped.batches, skipped.left, skipped.skipped) == (0, 2, 1)
    assert "is right" not in skipped.says
    assert "1 batch of earlier versions" in skipped.says


def test_a_scrub_without_news_writes_nothing_and_asks_for_two_objects(world: World) -> None:
    client = world.client(TINY)
    filled(client, 6)
    client.scrub("s")
    before = marks_of(world)
    assert len(before) == 1
    world.requests.clear()
    client.scrub("s", new_only=True)
    assert marks_of(world) == before
    assert [one.kind for one in world.requests if one.kind in {"list", "get", "set", "delete_many"}] == ["list", "get"]
    assert client.scrub("s").batches == 6, "without new_only everything is read"
    assert marks_of(world) == before


def test_a_scrub_leaves_one_object_that_no_audit_takes_for_an_orphan(world: World) -> None:
    client = world.client(TINY)
    filled(client, 6)
    for time in range(6, 9):
        client.scrub("s")
        append(client, time)
    client.maintain("s")
    assert len(marks_of(world)) == 1
    assert client.audit_orphans("s").orphans == ()
    check_swept(client, "s")
    assert not NAME.fullmatch(MARKS.strip("/")), "no shard can have this name"


def test_a_batch_that_is_compacted_away_is_forgotten_and_its_neighbours_stay_found(world: World) -> None:
    client = world.client(TINY)
    filled(client, 6)
    damage(client, world, 0)
    assert client.scrub("s").batches == 6
    append(client, 6)
    append(client, 7)
    with pytest.raises(Corrupt):
        client.compact("s", policy=EAGER)
    assert client.scrub("s", new_only=True).known == ((0, 1),), "a damaged batch cannot be compacted away"
    known = recall(world.inner.blob, S)
    assert len(known.sound) + len(known.damaged) == sum(1 for b in client.inspect("s").state.trace if b.count)


def test_damage_in_a_shard_that_is_finished_is_gone_and_nothing_is_remembered_of_it(world: World) -> None:
    client = world.client(TINY)
    filled(client, 6)
    damage(client, world, 2)
    client.scrub("s")
    assert len(marks_of(world)) == 1
    client.finish("s")
    found = client.scrub("s", new_only=True)
    assert (found.gone, found.mended, found.batches) == (((2, 3),), (), 0)
    assert "batch (2, 3) was damaged and is not in the shard any more" in found.says
    assert marks_of(world) == []
    assert client.scrub("s").gone == ()


def test_a_batch_that_is_rewritten_alone_is_read_again_though_its_id_is_the_same(world: World) -> None:
    client = world.client(TINY)
    filled(client, 12)
    client.compact("s", policy=EAGER)
    client.scrub("s")
    before = client.inspect("s").state.trace
    with client.open_reader("s") as read:
        read.downgrade_since(11)
    client.compact("s", policy=EAGER)
    after = client.inspect("s").state.trace
    assert [batch.id for batch in before] == [batch.id for batch in after]
    assert before != after
    found = client.scrub("s", new_only=True)
    assert (found.batches, found.left) == (1, 0)


def test_after_a_restore_what_the_other_log_found_sound_is_read_again_and_damage_stays_marked(world: World) -> None:
    client = world.client(TINY)
    filled(client, 4)
    damage(client, world, 1)
    client.scrub("s")
    seqno = client.inspect("s").seqno
    append(client, 4)
    client.scrub("s", new_only=True)
    consensus = world.inner.consensus
    assert isinstance(consensus, MemoryConsensus)
    consensus._logs["s"] = consensus.scan("s", SeqNo(1), seqno)
    other = world.client(TINY)
    found = other.scrub("s", new_only=True)
    assert (found.batches, found.left, found.known) == (4, 0, ((1, 2),))
    append(other, 4)  # the same id, the same times, and the same seqno as the batch that is lost
    assert other.scrub("s", new_only=True).batches == 2, "the new one, and the damaged one"


class Stop(BaseException):
    """A kill."""


def test_a_scrub_that_dies_between_writing_and_deleting_loses_nothing(world: World) -> None:
    client = world.client(TINY)
    filled(client, 4)
    client.scrub("s")
    damage(client, world, 1)

    class Killed:
        def decide(self, operation: Operation) -> Fate:
            if operation.kind == "delete_many":
                raise Stop
            return Fate()

    with pytest.raises(Stop):
        world.client(TINY, plan=Killed()).scrub("s")
    assert len(marks_of(world)) == 2
    found = client.scrub("s", new_only=True)
    assert (found.batches, found.left, found.known) == (1, 3, ((1, 2),)), "damage wins over an older mark of soundness"
    assert len(marks_of(world)) == 1


@pytest.mark.parametrize("before", ["nothing", "sound", "damaged"])
def test_two_scrubs_at_once_never_lose_a_mark_of_damage(world: World, before: str) -> None:
    """A disk that reads wrong only at times, and two scrubs in many interleavings: what one saw, the other keeps."""
    client = world.client(TINY)
    filled(client, 3)
    outcomes = set()
    for order in range(80):
        rng = Random(order)
        key, data = damage(client, world, 1)
        bad = world.inner.blob.get(key) or b""
        for old in marks_of(world):
            world.inner.blob.delete(old)
        if before != "nothing":
            put(world, key, bad if before == "damaged" else data)
            assert bool(client.scrub("s").damaged) is (before == "damaged")
        scrubs = [Paused(world) for _ in range(2)]
        while running := [scrub for scrub in scrubs if not scrub.done]:
            rng.choice(running).step()
            put(world, key, rng.choice([bad, data]))
        put(world, key, data)
        found = [scrub.done[0] for scrub in scrubs]
        saw, mended = any(one.damaged for one in found), any(one.mended for one in found)
        known = bool(known_damage(client.blob, [S])[S].damaged)
        outcomes.add((saw, mended, known))
        if (saw or before == "damaged") and not mended:
            assert known, f"the mark is lost in order {order}"
        client.scrub("s")
        assert not known_damage(client.blob, [S])[S].damaged
        assert len(marks_of(world)) == 1, "the next scrub tidies up"
    assert len(outcomes) >= 2, "the interleavings differ"


class Paused:
    """A scrub in a thread of its own, which stops before each request to Blob until `step` lets it continue."""

    def __init__(self, world: World) -> None:
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.done: list[Scrubbed] = []
        self._client = world.client(TINY, plan=self)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def decide(self, operation: Operation) -> Fate:
        if operation.kind in {"list", "get", "get_range", "set", "delete_many"} and self._is_mine():
            self._stopped.release()
            self._go.acquire()
        return Fate()

    def _is_mine(self) -> bool:
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        self._go.acquire()
        self.done.append(self._client.scrub("s"))
        self._stopped.release()

    def step(self) -> None:
        self._go.release()
        assert self._stopped.acquire(timeout=30)
        if self.done:
            self._thread.join()


@pytest.mark.parametrize("what", ["cut", "flipped", "foreign", "newer", "undecodable"])
def test_when_its_memory_cannot_be_read_everything_is_read_again(world: World, what: str) -> None:
    client = world.client(TINY)
    filled(client, 4)
    damage(client, world, 1)
    client.scrub("s")
    [key] = marks_of(world)
    data = world.inner.blob.get(key) or b""
    spoiled = {
        "cut": data[:-1], "flipped": data[:-1] + bytes([data[-1] ^ 1]), "foreign": b"hello",
        "newer": framed(data[:4], 2, data[21:]),
        "undecodable": framed(b"PSTm", 1, msgspec.msgpack.encode(["no", "marks"])),
    }  # fmt: skip
    put(world, key, spoiled[what])
    assert known_damage(client.blob, [S])[S].unreadable
    found = client.scrub("s", new_only=True, after=client.inspect("s").seqno)
    assert (found.batches, found.left, [id_ for id_, _ in found.damaged]) == (4, 0, [(1, 2)])
    assert found.remembered
    if what == "newer":
        assert key in marks_of(world), "what a newer release remembers is left to it"
    else:
        assert key not in marks_of(world)
        assert client.scrub("s", new_only=True).batches == 1


def test_a_read_only_client_scrubs_reports_and_says_that_nothing_is_remembered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with persist.open(f"file:{tmp_path}/data", config=TINY) as client:
        filled(client, 4)
        [part] = list((tmp_path / "data/blob/s").rglob("*.parquet"))[:1]
        part.write_bytes(part.read_bytes()[:-1])
    with persist.open(f"file:{tmp_path}/data", read_only=True) as looking, caplog.at_level(logging.WARNING):
        found = looking.scrub("s")
        assert (found.batches, len(found.damaged), found.remembered) == (4, 1, False)
        assert "read_only=True" in found.why_not
        assert "this is not remembered: " in found.says
        assert "cannot be remembered" in caplog.text
        assert not list((tmp_path / "data/blob").glob("-scrub/**/*.damaged"))


@pytest.mark.parametrize("kinds", [("set",), ("list",), ("delete_many",), ("list", "set", "delete_many")])
def test_a_store_that_refuses_to_remember_hides_no_damage(world: World, kinds: tuple[str, ...]) -> None:
    client = world.client(TINY)
    filled(client, 4)
    client.scrub("s")
    damage(client, world, 1)

    class Refusing:
        def decide(self, operation: Operation) -> Fate:
            is_memory = operation.key.startswith("-scrub/")
            return Fate(Outcome.REFUSED) if operation.kind in kinds and is_memory else Fate()

    refused = world.client(TINY.model_copy(update={"timeout_s": 0.01}), plan=Refusing())
    found = refused.scrub("s")
    assert (len(found.damaged), found.batches, found.remembered) == (1, 4, "set" not in kinds)


def test_a_scrub_that_fails_half_way_has_remembered_what_it_found(world: World) -> None:
    client = world.client(TINY)
    filled(client, 4)
    damage(client, world, 1)

    def failing(done: int, _total: int) -> None:
        if done == 3:
            raise Determinate("planted")

    with pytest.raises(Determinate):
        client.scrub("s", progress=failing)
    found = client.scrub("s", new_only=True)
    assert (found.batches, found.left, found.known) == (2, 2, ((1, 2),))


def test_a_long_scrub_remembers_damage_at_once_and_the_rest_now_and_then(world: World) -> None:
    client = world.client(TINY)
    filled(client, 8)
    damage(client, world, 1)
    seen: list[int] = []

    def slow(_done: int, _total: int) -> None:
        world.clock.advance(2)
        seen.append(len(recall(world.inner.blob, S).damaged))

    client.scrub("s", progress=slow)
    assert seen[2] == 1, "killed after the third batch, it would have told of the damage in the second"


def test_damage_is_known_from_one_listing_of_all_shards_of_more_than_a_page() -> None:
    world = World("memory:")
    marks = MARKS_FORM.encode(Marks(SeqNo(1), (b"x" * 16,), ()))
    bad = MARKS_FORM.encode(Marks(SeqNo(1), (), (Mark(b"y" * 16, 3, 4, "planted", 5),)))
    names = [ShardId(f"shard-{number:04d}") for number in range(1_500)]
    for number, name in enumerate(names):
        is_bad = number % 700 == 699
        world.inner.blob.set(marks_key(name, 5, number, is_damaged=is_bad), bad if is_bad else marks)
    client = world.client()
    world.requests.clear()
    found = known_damage(client.blob, names)
    assert list(found) == names
    assert {name: [mark.says for mark in one.damaged.values()] for name, one in found.items() if one.damaged} == {
        "shard-0699": ["planted"], "shard-1399": ["planted"],
    }  # fmt: skip
    assert world.count("list") == 3, "one of all, and one for each damaged shard"
    assert not known_damage(client.blob, names[:1])[names[0]].damaged
    assert known_damage(client.blob, [S]) == {}, "never scrubbed"
    world.close()


def test_marks_are_stored_as_they_were_and_name_their_key() -> None:
    marks = Marks(SeqNo(9), (b"a" * 16,), (Mark(b"b" * 16, 3, 4, "planted", 5),))
    assert MARKS_FORM.decode(MARKS_FORM.encode(marks), "here") == marks
    with pytest.raises(Corrupt, match="here"):
        MARKS_FORM.decode(b"", "here")
    assert has_damage(marks_key(S, 5, 7, is_damaged=True)) is True
    assert has_damage(marks_key(S, 5, 7, is_damaged=False)) is False
    assert has_damage("s/rollup/v1") is None
    assert open_location("memory:").blob.list(MARKS) is not None
