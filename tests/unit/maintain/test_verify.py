"""A verification finds each damage, names it, raises nothing, and says what it did not look at; sound is sound."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import persist_lib as persist
from persist_lib.core.formats import NEWEST
from persist_lib.errors import NotFound
from persist_lib.format.frame import HEADER_BYTES
from persist_lib.format.log import ROLLUP_MAGIC, ROW_MAGIC, decode_row, encode_row
from persist_lib.format.paths import WALKED, marks_prefix
from persist_lib.format.scrub_marks import WALKED_FORM, Walked
from persist_lib.frontier import at
from persist_lib.ids import SeqNo, ShardId
from persist_lib.location.api import Row
from persist_lib.maintain import Verified, known_damage
from persist_lib.maintain.log_walk import Finding
from persist_lib.testing import Fate
from tests.conformance.stores import CONSENSUSES
from tests.framing import chained, framed
from tests.shards import EAGER, TINY, filled
from tests.worlds import SCHEMA, World, row

SERVERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("postgresql", "s3")]
S = ShardId("s")
GOLDEN = "50535477011473b20c3974b43b2395f6f53ec6660992cd012cc410000102030405060708090a0b0c0d0e0f"


@pytest.fixture(params=["memory", "sqlite"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    made = World(CONSENSUSES[request.param].prepare(tmp_path))
    yield made
    made.close()


def rows_of(world: World) -> list[Row]:
    return world.inner.consensus.scan("s", SeqNo(0), 1000)


def rewrite(world: World, rows: list[Row]) -> None:
    """Make these the rows of the log, as a disk or a person at the database could."""
    consensus, old = world.inner.consensus, rows_of(world)
    if (logs := getattr(consensus, "_logs", None)) is not None:
        logs["s"] = list(rows)
        return
    consensus.rewind("s", SeqNo(old[0].seqno - 1), old[-1].newest)
    for before, one in zip([None, *rows], rows, strict=False):
        assert consensus.compare_and_set("s", before and before.newest, one.data)


def flipped(data: bytes, at_: int = -1) -> bytes:
    return data[:at_] + bytes([data[at_] ^ 1]) + (data[at_ + 1 :] if at_ != -1 else b"")


def put(world: World, key: str, data: bytes) -> None:
    world.inner.blob.delete(key)
    world.inner.blob.set(key, data)


def parts_of(world: World) -> list[str]:
    return sorted(entry.key for entry in world.inner.blob.list("s/") if entry.key.endswith(".parquet"))


def verify(world: World, **how: Any) -> Verified:
    return world.client(TINY).verify("s", **how)


def kinds(found: Verified) -> list[tuple[str, str]]:
    return [(one.kind, one.about) for one in found.findings]


def copied(client: persist.Client) -> None:
    """A shard whose log is whole, and that has two rollups."""
    filled(client, 4)
    client.roll_up("s", force=True)
    with client.open_writer("s", SCHEMA) as write:
        for time in range(4, 8):
            write.compare_and_append([row(time, time=time)], time, time + 1)
    client.roll_up("s", force=True)


def test_a_sound_shard_is_sound_and_a_second_look_reads_only_what_was_added(world: World) -> None:
    client = world.client(TINY)
    copied(client)
    seqno = client.inspect("s").seqno
    first = client.verify("s")
    assert (first.findings, first.rows, first.versions, first.rollups) == ((), seqno, seqno, 2)
    assert (first.newest, first.left, first.not_checked, first.remembered) == (seqno, 0, (), True)
    assert first.scrubbed is not None
    assert (first.objects, first.scrubbed.batches) == (len(parts_of(world)) + 2, 8)
    again = client.verify("s")
    assert (again.findings, again.rows, again.left, again.objects) == ((), 0, seqno, first.objects)
    assert again.not_checked == (f"{seqno} rows of logs found sound earlier", "8 batches found sound by earlier scrubs")
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(8, time=8)], 8, 9)
    third = client.verify("s")
    newest = client.inspect("s").seqno
    assert third.findings == ()
    assert third.newest == newest
    assert newest - seqno <= third.rows < newest, "from the rollup before what was verified"
    whole = client.verify("s", full=True)
    assert (whole.findings, whole.rows, whole.not_checked) == ((), newest, ())


def test_upkeep_between_looks_leaves_a_shard_sound(world: World) -> None:
    client = world.client(TINY)
    copied(client)
    client.verify("s")
    for time in range(8, 12):
        with client.open_writer("s", SCHEMA) as write:
            write.compare_and_append([row(time, time=time)], time, time + 1)
        client.maintain("s", policy=EAGER)
        assert client.verify("s").findings == ()
        whole = client.verify("s", full=True)
        assert whole.findings == ()
        assert whole.truncated > 0
    client.finish("s")
    assert client.verify("s").findings == ()


def test_a_flipped_bit_of_any_row_is_found_and_the_rows_behind_a_copy_are_still_judged(world: World) -> None:
    copied(world.client(TINY))
    good = rows_of(world)
    for index in range(len(good)):
        for at_ in (3, 10, -1):
            bad = list(good)
            bad[index] = good[index]._replace(data=flipped(good[index].data, at_))
            rewrite(world, bad)
            found = verify(world)
            assert found.is_damaged
            assert ("row", f"v{index + 1}") in kinds(found), (index, at_)
            assert found.findings[0].do == "persist shard repair s --dry-run"
            if index < 3:
                assert found.versions >= len(good) - 7, "from the first copy on"
    rewrite(world, good)
    assert verify(world).findings == ()


def test_two_rows_that_changed_places_are_found(world: World) -> None:
    copied(world.client(TINY))
    good = rows_of(world)
    swapped = [*good[:2], good[2]._replace(data=good[3].data), good[3]._replace(data=good[2].data), *good[4:]]
    rewrite(world, swapped)
    assert {("row", "v3"), ("row", "v4")} <= set(kinds(verify(world)))


def test_a_row_that_is_linked_and_says_what_cannot_be_is_found(world: World) -> None:
    """A heartbeat that appends, and an append that changes nothing."""
    client = world.client(TINY)
    filled(client, 4)
    good = rows_of(world)
    index = next(i for i, one in enumerate(good) if decode_row(one.data, "").command == "CompareAndAppend")

    def other_command(fields: list[Any]) -> None:
        fields[2] = "Heartbeat"

    rewrite(world, chained(good, index, other_command))
    found = verify(world)
    assert ("history", f"v{index + 1}") in kinds(found)
    assert any("without an append" in one.says for one in found.findings)

    def without_diff(fields: list[Any]) -> None:
        fields[6] = {}

    rewrite(world, chained(good, index, without_diff))
    assert ("state", f"v{index + 2}") in kinds(verify(world)), "the next one does not apply"


def test_a_row_that_names_another_row_as_the_one_before_it_is_found(world: World) -> None:
    copied(world.client(TINY))
    good = rows_of(world)
    decoded = decode_row(good[5].data, "")
    other = encode_row(msgspec.structs.replace(decoded, previous=bytes(16)), good[5].data[4])
    rewrite(world, [*good[:5], good[5]._replace(data=other), *good[6:]])
    found = kinds(verify(world))
    assert ("chain", "v6") in found
    assert ("chain", "v7") in found


@pytest.mark.parametrize("world", ["memory"], indirect=True)
def test_rows_that_are_not_there_are_a_gap_and_not_a_truncation(world: World) -> None:
    copied(world.client(TINY))
    good = rows_of(world)
    rewrite(world, good[:3] + good[5:])
    assert ("gap", "v4") in kinds(verify(world))
    rewrite(world, good[4:])
    found = verify(world)
    assert [kind for kind, _ in kinds(found)] == []
    assert found.truncated == 4
    assert any("before the oldest copy" in why for why in found.not_checked)


@pytest.mark.parametrize("how", ["gone", "flipped", "cut", "another", "of other contents"])
def test_a_rollup_that_is_not_the_state_that_the_log_has_is_found(world: World, how: str) -> None:
    client = world.client(TINY)
    copied(client)
    older, newer = sorted(entry.key for entry in world.inner.blob.list("s/rollup/"))
    data, other = world.inner.blob.get(older) or b"", world.inner.blob.get(newer) or b""
    body = msgspec.msgpack.decode(data[HEADER_BYTES:])
    body[2][12] += 1
    made = framed(ROLLUP_MAGIC, data[4], msgspec.msgpack.encode(body))
    spoiled = {"flipped": flipped(data), "cut": data[:-1], "another": other, "of other contents": made}
    world.inner.blob.delete(older)
    if how != "gone":
        world.inner.blob.set(older, spoiled[how])
    found = verify(world)
    assert ("rollup", older) in kinds(found)
    assert len(found.findings) <= 2, "it, and that it has another size"
    assert found.scrubbed is not None, "the rest is judged"
    put(world, older, data)
    assert verify(world).findings == ()


def test_a_newest_rollup_that_is_gone_stops_readers_but_no_verification(world: World) -> None:
    client = world.client(TINY)
    copied(client)
    newest = max(entry.key for entry in world.inner.blob.list("s/rollup/"))
    world.inner.blob.delete(newest)
    with pytest.raises(persist.Damage):
        world.client(TINY).inspect("s")
    found = verify(world)
    assert kinds(found) == [("rollup", newest)]
    assert found.scrubbed is not None
    assert found.scrubbed.batches == 8


def test_a_part_that_is_gone_or_damaged_is_found_by_the_next_look_or_by_a_full_one(world: World) -> None:
    client = world.client(TINY)
    copied(client)
    client.verify("s")
    first, second, *_ = parts_of(world)
    data = world.inner.blob.get(first) or b""
    world.inner.blob.delete(first)
    found = client.verify("s")
    assert kinds(found) == [("missing", first)]
    assert f"{first}: it is not there (said: {len(data):,} bytes)" in found.findings[0].says
    assert len(known_damage(client.blob, [S])[S].damaged) == 1, "health knows"
    world.inner.blob.set(first, data[:-1])
    assert kinds(client.verify("s")) == [("size", first)]
    put(world, first, data)
    assert client.verify("s").findings == ()
    good = world.inner.blob.get(second) or b""
    put(world, second, flipped(good, 200))
    assert client.verify("s").findings == (), "it was read before, and is as long as it was"
    [one] = client.verify("s", full=True).findings
    assert one.kind == "batch"
    assert second in one.says


def test_an_object_that_an_older_version_needs_is_looked_for_while_a_reader_may_read_it(world: World) -> None:
    client = world.client(TINY)
    filled(client, 6)
    old = parts_of(world)
    with world.client(TINY).open_reader("s"):
        client.compact("s", policy=EAGER)
        assert client.inspect("s").state.garbage
        found = client.verify("s", full=True)
        assert found.findings == ()
        assert found.garbage == 6
        data = world.inner.blob.get(old[0]) or b""
        world.inner.blob.delete(old[0])
        assert kinds(client.verify("s")) == [("missing", old[0])]
        world.inner.blob.set(old[0], data)
    world.inner.blob.delete(old[0])
    assert client.verify("s", full=True).findings == (), "no reader can reach it any more"


def test_orphans_are_a_finding_and_no_damage_and_what_may_be_linked_yet_is_neither(world: World) -> None:
    client = world.client(TINY)
    filled(client, 2)
    world.inner.blob.set("s/w0123456789abcdef/0000000000000001.parquet", b"x" * 100)
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(1, time=2)], 2, 3)
        world.inner.blob.set(f"s/{write.id}/0000000000000002.parquet", b"y" * 50)
        found = client.verify("s")
    assert kinds(found) == [("orphan", "s/w0123456789abcdef/0000000000000001.parquet")]
    assert (found.is_sound, found.is_damaged, found.orphans, found.orphan_bytes) == (False, False, 1, 100)
    assert found.pending == 1
    assert found.findings[0].do == "persist maintain s --only orphans"
    client.audit_orphans("s")
    assert client.verify("s").findings == ()


@pytest.mark.parametrize("world", ["memory"], indirect=True)
def test_what_is_deleted_or_linked_while_it_looks_is_no_damage(world: World) -> None:
    """A compaction and a collection between the listing and the state, and appends while it walks."""
    client, other = world.client(TINY), world.client(TINY)
    filled(client, 6)
    client.verify("s")
    for n in range(40):
        looking = world.client(TINY, plan=Meddling(other, n // 2))
        assert not looking.verify("s", full=bool(n % 2)).findings, n


class Meddling:
    """At the n-th request another client appends, compacts, collects and truncates."""

    def __init__(self, client: persist.Client, number: int) -> None:
        self._client, self._left = client, number + 1

    def decide(self, _operation: object) -> Any:
        self._left -= 1
        if self._left == 0:
            upper = self._client.inspect("s").state.upper.time or 0
            with self._client.open_writer("s", SCHEMA) as write:
                write.compare_and_append([row(1, time=upper)], upper, upper + 1)
            self._client.maintain("s", policy=EAGER)
        return Fate()


def test_what_is_remembered_is_trusted_only_while_that_row_is_the_same(world: World) -> None:
    client = world.client(TINY)
    filled(client, 4)
    client.verify("s")
    good = rows_of(world)
    rewrite(world, good[:-2])
    other = world.client(TINY)
    upper = other.inspect("s").state.upper.time or 0
    with other.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(9, time=upper)], upper, upper + 1)
    found = other.verify("s")
    assert found.rows == len(rows_of(world)) >= len(good)
    assert any("is another row by now: all was walked again" in why for why in found.not_checked)
    assert other.verify("s").rows == 0, "and that is remembered in its place"


def test_a_verdict_is_kept_only_of_a_sound_log_and_one_object_is_left(world: World) -> None:
    client = world.client(TINY)
    copied(client)
    good = rows_of(world)
    rewrite(world, [*good[:2], good[2]._replace(data=flipped(good[2].data)), *good[3:]])
    assert client.verify("s").is_damaged
    assert verdicts(world) == []
    rewrite(world, good)
    for time in range(8, 11):
        with client.open_writer("s", SCHEMA) as write:
            write.compare_and_append([row(time, time=time)], time, time + 1)
        client.verify("s")
        [key] = verdicts(world)
    newest = client.inspect("s")
    assert WALKED_FORM.decode(world.inner.blob.get(key) or b"", key) == Walked(newest.seqno, newest.digest)
    before = world.count("set")
    client.verify("s")
    assert world.count("set") == before, "nothing new is nothing written"


def verdicts(world: World) -> list[str]:
    return [entry.key for entry in world.inner.blob.list(marks_prefix(S)) if entry.key.endswith(WALKED)]


@pytest.mark.parametrize("how", ["flipped", "foreign", "newer"])
def test_a_verdict_that_cannot_be_read_is_as_if_there_were_none(world: World, how: str) -> None:
    client = world.client(TINY)
    copied(client)
    client.verify("s")
    [key] = verdicts(world)
    data = world.inner.blob.get(key) or b""
    newer = framed(b"PSTw", 2, data[HEADER_BYTES:])
    put(world, key, {"flipped": flipped(data), "foreign": b"hello", "newer": newer}[how])
    assert client.verify("s").rows == len(rows_of(world))
    assert (key in verdicts(world)) is (how == "newer"), "what a newer release wrote is left to it"


def test_the_bytes_of_a_verdict_are_the_same_for_ever() -> None:
    data = WALKED_FORM.encode(Walked(SeqNo(300), bytes(range(16))))
    assert data.hex() == GOLDEN
    assert WALKED_FORM.decode(data, "k") == Walked(SeqNo(300), bytes(range(16)))


@pytest.mark.parametrize("world", ["memory"], indirect=True)
def test_a_scrub_of_a_release_without_verdicts_leaves_them(world: World) -> None:
    """It lists what is a key of marks, and deletes no other."""
    client = world.client(TINY)
    filled(client, 3)
    client.verify("s")
    before = verdicts(world)
    with client.open_writer("s", SCHEMA) as write:
        write.compare_and_append([row(3, time=3)], 3, 4)
    client.scrub("s", new_only=True)
    assert verdicts(world) == before
    assert client.scrub("s", new_only=True).batches == 0


def test_what_a_newer_release_wrote_is_not_checked_and_no_damage(world: World) -> None:
    client = world.client(TINY)
    copied(client)
    newer = framed(ROW_MAGIC, NEWEST + 1, b"whatever")
    assert world.inner.consensus.compare_and_set("s", rows_of(world)[-1].newest, newer)
    found = verify(world)
    assert found.findings == ()
    assert any("a newer release" in why for why in found.not_checked)
    assert any("the newest state cannot be read" in why for why in found.not_checked)
    assert verdicts(world) == []


def test_a_shard_without_a_copy_of_its_oldest_state_says_that_nothing_could_be_replayed(world: World) -> None:
    client = world.client(TINY)
    filled(client, 6)
    client.maintain("s")
    for entry in [*world.inner.blob.list("s/rollup/")]:
        world.inner.blob.delete(entry.key)
    found = verify(world)
    assert {kind for kind, _ in kinds(found)} == {"rollup", "start"}
    assert found.scrubbed is None
    assert "objects and batches, as the newest state cannot be read" in found.not_checked


@pytest.mark.parametrize("kind", SERVERS)
def test_damage_on_servers_is_found_as_well(kind: str, tmp_path: Path) -> None:
    """A row that is flipped, a rollup and a part that are gone: on PostgreSQL, and where S3 has the log and objects."""
    url = CONSENSUSES[kind].prepare(tmp_path)
    world = World(url if kind == "s3" else f"file:{tmp_path}/blobs", consensus=url)
    client = world.client(TINY)
    copied(client)
    assert client.verify("s").findings == ()
    assert client.verify("s").rows == 0
    rollup, part = max(entry.key for entry in world.inner.blob.list("s/rollup/")), parts_of(world)[0]
    for key in (rollup, part):
        data = world.inner.blob.get(key) or b""
        world.inner.blob.delete(key)
        assert ("missing" if key == part else "rollup", key) in kinds(verify(world, full=True))
        world.inner.blob.set(key, data)
    good = rows_of(world)
    rewrite(world, [*good[:2], good[2]._replace(data=flipped(good[2].data)), *good[3:]])
    assert kinds(verify(world, full=True)) == [("row", "v3")]
    world.close()


def test_there_is_nothing_to_verify_of_a_shard_that_is_not_there(world: World) -> None:
    with pytest.raises(NotFound):
        verify(world)


def test_a_client_that_may_not_write_verifies_and_remembers_nothing(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/data"
    with persist.open(url) as client:
        filled(client, 3)
    with persist.open(url, read_only=True) as client:
        found = client.verify("s")
        assert found.findings == ()
        assert not found.remembered


def test_the_sentence_of_a_finding_says_what_is_said_and_what_is_there() -> None:
    assert Finding("size", "a/b", "5 bytes", "it has 4 bytes", "do").says == "a/b: it has 4 bytes (said: 5 bytes)"
    assert Finding("row", "v7", "", "it is damaged", "do").says == "v7: it is damaged"
    assert at(1) > at(0)
