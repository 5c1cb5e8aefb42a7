"""A location is verified as a whole: its shards, and what records promise of them, in every kind of layer."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import persist_lib as persist
from persist_lib import verify
from persist_lib.catalog.catalog import Contents, setting, without
from persist_lib.catalog.records import CollectionRecord, RenditionRecord
from persist_lib.core import commands as c
from persist_lib.core.formats import NEWEST
from persist_lib.errors import NotFound
from persist_lib.format.log import decode_row
from persist_lib.ids import SeqNo
from persist_lib.testing import Fate, Outcome
from persist_lib.verify import Report
from tests.commands import invoke
from tests.shards import TINY, filled
from tests.worlds import SCHEMA, World

ARCHIVE = Path(__file__).parents[2] / "golden" / "location_2026_11_24.tar.xz"
CLOCK = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"}, times="ms")


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[persist.Client]:
    """A location with shards, a collection of several renditions, tables, a source, a stream, a log, a pending area."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    with persist.open(f"file:{tmp_path}/lake") as opened:
        yield opened


def found(report: Report) -> set[tuple[str, str]]:
    return {(one.kind, one.about) for _, one in report.findings}


def collection(client: persist.Client, name: str) -> CollectionRecord:
    with client.controller() as controller:
        return controller.catalog.fetch().find(name)


def change(client: persist.Client, to: Callable[[Contents], dict[tuple[str, str], Any]]) -> None:
    """Write other records into the catalog."""
    with client.controller() as controller:
        controller.catalog.change(lambda contents: (to(contents), None), client.runtime.deadline(10))


def rendition(contents: Contents, name: str, number: int = 1) -> RenditionRecord:
    return contents.renditions[(contents.find(name).id, number)]


def erase(client: persist.Client, shard: str) -> None:
    """Take all rows of a shard away, as a restore of another copy of the database could."""
    consensus = client.consensus
    rows = consensus.scan(shard, SeqNo(0), 10_000)
    assert consensus.rewind(shard, SeqNo(rows[0].seqno - 1), rows[-1].newest)


def reopened(client: persist.Client) -> persist.Client:
    return persist.open(client.url)


def test_a_location_of_every_kind_of_layer_is_sound_and_a_second_look_reads_no_log(lake: persist.Client) -> None:
    first = verify.check(lake)
    assert (first.findings, first.failed, first.is_sound) == ((), {}, True)
    assert dict(first.looked_at) == {
        "table": 7, "timeline": 1, "source": 1, "stream": 1, "pending area": 1, "event log": 1
    }  # fmt: skip
    assert set(first.shards) == set(lake.shards())
    again = verify.check(lake)
    assert again.findings == ()
    assert sum(one.rows for one in again.shards.values()) == 0
    assert again.cost.requests < first.cost.requests
    whole = verify.check(lake, full=True)
    assert whole.findings == ()
    assert whole.not_checked == ()
    lake.maintain()
    assert verify.check(lake).findings == ()


def test_tables_are_named_as_people_name_them_and_only_their_promises_are_judged(lake: persist.Client) -> None:
    report = verify.check(lake, ["orders"])
    id_ = collection(lake, "orders").id
    assert report.shards
    assert all(shard.startswith(id_) for shard in report.shards)
    with pytest.raises(NotFound, match="Did you mean"):
        verify.check(lake, ["order"])


@pytest.mark.parametrize("what", ["renditions", "r1.s0"])
def test_a_shard_of_a_collection_that_is_gone_is_a_broken_promise(lake: persist.Client, what: str) -> None:
    shard = f"{collection(lake, 'orders').id}.{what}"
    erase(lake, shard)
    with reopened(lake) as client:
        report = verify.check(client)
        assert ("promise", shard) in found(report)
        assert report.is_damaged
        [says] = {one.says for _, one in report.findings if one.about == shard}
        assert "there is no such shard (said: " in says
        assert "collection orders" in says
        assert ("promise", shard) in found(verify.check(client, ["orders"]))
        assert verify.check(client, ["shard"]).is_sound, "of another table nothing is said"


def test_a_wal_the_bindings_and_the_shards_of_a_stream_and_a_log_that_are_gone_are_broken_promises(
    lake: persist.Client,
) -> None:  # fmt: skip
    wal = next(shard for shard in lake.shards() if shard.endswith(".wal"))
    bindings = next(shard for shard in lake.shards() if shard.endswith(".bindings"))
    gone = {wal, bindings, "house.unsealed", "ledger.notes"}
    for shard in gone:
        erase(lake, shard)
    with reopened(lake) as client:
        report = verify.check(client)
        assert {about for kind, about in found(report) if kind == "promise"} == gone


def test_a_shard_that_is_finished_does_not_keep_its_promise() -> None:
    with persist.open("memory:") as client, client.controller() as controller:
        controller.create("orders", CLOCK)
        shard = f"{collection(client, 'orders').id}.r1.s0"
        machine = client.machine(shard)
        machine.commit(lambda state, _now: c.ReleaseHold("collection", state.holds["collection"].opaque))
        with client.open_writer(shard, CLOCK, layer="collection") as write:
            write.finish()
        client.finish(shard)
        report = verify.check(client)
        assert ("promise", shard) in found(report)
        assert any("it is finished for good" in one.says for _, one in report.findings)


def test_records_that_do_not_fit_together_are_found() -> None:
    with persist.open("memory:") as client, client.controller() as controller:
        for name in ("orders", "payments"):
            controller.create(name, CLOCK)
        orders, payments = collection(client, "orders"), collection(client, "payments")
        assert verify.check(client).is_sound
        replace = msgspec.structs.replace
        other = f"{payments.id}.r1.s0"

        def twice(contents: Contents) -> dict[tuple[str, str], Any]:
            return setting(replace(rendition(contents, "orders"), places=(other,)))

        change(client, twice)
        assert any("rendition 1, too (said: " in one.says for _, one in verify.check(client).findings)
        change(client, lambda contents: setting(replace(rendition(contents, "orders"), places=())))
        assert verify.check(client).is_sound
        change(client, lambda _: setting(replace(orders, name="payments")))
        assert ("record", "table payments") in found(verify.check(client))
        change(client, lambda _: setting(replace(orders, timeline="twffffffffffffffff")))
        assert ("record", "collection orders") in found(verify.check(client))
        change(client, lambda _: setting(orders))
        record = rendition(controller.catalog.fetch(), "payments")
        change(client, lambda _: without(payments))
        report = verify.check(client)
        assert ("record", f"rendition 1 of {payments.id}") in found(report)
        assert ("stray", payments.shard) in found(report)
        change(client, lambda _: setting(payments) | without(record))
        assert ("record", "collection payments") in found(verify.check(client)), "it has no rendition"


def test_columns_of_a_rendition_that_its_shards_do_not_have_are_found() -> None:
    wider = persist.Schema(key={"id": "int64 not null"}, value={"word": "string", "more": "int64"}, times="ms")
    with persist.open("memory:") as client, client.controller() as controller:
        controller.create("orders", CLOCK)
        controller.create("others", wider)
        form = rendition(controller.catalog.fetch(), "others").schema

        def other(contents: Contents) -> dict[tuple[str, str], Any]:
            return setting(msgspec.structs.replace(rendition(contents, "orders"), schema=form))

        change(client, other)
        assert ("promise", f"{collection(client, 'orders').id}.r1.s0") in found(verify.check(client))


def test_history_that_a_collection_promises_and_a_shard_has_given_up_is_found() -> None:
    with persist.open("memory:") as client, client.controller() as controller:
        controller.create("orders", persist.Schema(key={"id": "int64 not null"}), mode="compare_and_append")
        with controller.open_writer("orders") as write:
            write.compare_and_append([{"id": 1, "_time": 0}], 0, 9)
        assert verify.check(client).is_sound
        shard = f"{collection(client, 'orders').id}.r1.s0"
        client.downgrade_hold(shard, "collection", 7)
        report = verify.check(client)
        assert found(report) == {("promise", shard)}
        said = "it is given up before [7] (said: history of collection orders from 0 on)"
        assert {one.says for _, one in report.findings} == {f"{shard}: {said}"}


def test_bindings_that_are_older_than_what_was_made_of_them_are_found(lake: persist.Client) -> None:
    """As after a restore of one shard from an older copy: other messages would get the times that are given away."""
    bindings = next(shard for shard in lake.shards() if shard.endswith(".bindings"))
    rows = lake.consensus.scan(bindings, SeqNo(0), 100)
    appends = [one for one in rows if decode_row(one.data, "").command == "CompareAndAppend"]
    lake.consensus.rewind(bindings, SeqNo(appends[0].seqno - 1), rows[-1].newest)
    with reopened(lake) as client:
        report = verify.check(client)
        assert found(report) == {("promise", bindings)}
        assert any("data of source orders-in was made" in one.says for _, one in report.findings)


def test_a_promoted_shard_is_bound_to_its_collection(tmp_path: Path) -> None:
    with persist.open(f"file:{tmp_path}/data", config=persist.Config(format=NEWEST)) as client:
        with client.table("orders", CLOCK) as table:
            table.append([{"id": 1, "word": "a"}])
            table.promote()
        report = verify.check(client)
        assert (report.findings, dict(report.looked_at)) == ((), {"table": 1})
        assert "orders" in report.shards
        change(client, lambda contents: without(contents.find("orders"), rendition(contents, "orders")))
        assert ("stray", "orders") in found(verify.check(client))


def test_shards_and_holds_of_no_record_and_batches_of_no_table_are_said_and_are_no_damage(lake: persist.Client) -> None:
    lake.open_writer("cffffffffffffffff.r1.s0", SCHEMA, layer="collection").close()
    lake.open_writer("lost.unsealed", SCHEMA, layer="stream").close()
    renditions = collection(lake, "orders").shard
    lake.machine(renditions).commit(lambda state, _now: c.SetHold("copy-r9", state.since, None, b""))
    lake.blob.set("-pending/nothing/w/1", b"x")
    lake.blob.set("nothing/w0123456789abcdef/0000000000000001.parquet", b"x" * 10)
    report = verify.check(lake, full=True)
    assert found(report) == {
        ("stray", "cffffffffffffffff.r1.s0"), ("stray", "lost.unsealed"), ("stray", renditions),
        ("stray", "-pending/nothing/"), ("stray", "nothing/"),
    }  # fmt: skip
    assert (report.is_sound, report.is_damaged) == (False, False)
    assert ("stray", "nothing/") not in found(verify.check(lake)), "which says that it did not look"


def test_records_that_cannot_be_read_stop_nothing_else(lake: persist.Client) -> None:
    erase(lake, "_catalog")
    with reopened(lake) as client:
        report = verify.check(client)
        assert len(report.shards) == len(lake.shards())
        strays = {about for kind, about in found(report) if kind == "stray"}
        assert any(about.endswith(".renditions") for about in strays)
        assert report.looked_at["stream"] == 1


def test_a_store_that_does_not_answer_for_one_shard_is_no_damage_and_not_sound(world: World) -> None:
    client = world.client(TINY)
    filled(client, 2)
    filled(client, 2, shard="t")

    class Broken:
        def decide(self, operation: Any) -> Fate:
            return Fate(Outcome.REFUSED) if operation.key.startswith("t/") else Fate()

    report = verify.check(world.client(TINY.model_copy(update={"timeout_s": 0.5}), plan=Broken()))
    assert list(report.failed) == ["t"]
    assert report.findings == ()
    assert not report.is_sound
    assert not report.is_damaged


def test_the_command_prints_a_line_a_finding_what_it_did_not_check_and_ends_with_the_code(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/data"
    with persist.open(url, config=TINY) as client:
        filled(client, 3, shard="orders")
        filled(client, 3, shard="payments")
        key = next(entry.key for entry in client.blob.list("orders/"))
    sound = invoke("--location", url, "verify")
    assert sound.exit_code == 0, sound.output
    assert sound.stdout.splitlines()[-1] == "nothing is wrong"
    assert "checked 2 shards, " in sound.stdout
    again = invoke("--location", url, "verify")
    assert "not checked: " in again.stdout
    assert "6 batches found sound by earlier scrubs" in again.stdout
    path = tmp_path / "data/blob" / key
    data = path.read_bytes()
    path.unlink()
    lost = invoke("--location", url, "verify", "orders")
    assert lost.exit_code == 3
    text = " ".join(lost.stdout.split())
    assert f"missing {key}: it is not there (said: {len(data):,} bytes) bring the object back" in text
    assert text.endswith("1 finding")
    as_json = json.loads(invoke("--location", url, "--json", "verify").stdout)
    assert [(one["shard"], one["kind"], one["is_damage"]) for one in as_json["findings"]] == [
        ("orders", "missing", True)
    ]
    assert invoke("--location", url, "verify", "payments").exit_code == 0
    path.write_bytes(data)
    (tmp_path / "data/blob/orders/w0123456789abcdef").mkdir()
    (tmp_path / "data/blob/orders/w0123456789abcdef/0000000000000001.parquet").write_bytes(b"x")
    orphan = invoke("--location", url, "verify")
    assert orphan.exit_code == 1, orphan.output
    assert "persist maintain orders --only orphans" in orphan.stdout
    assert invoke("--location", url, "verify", "nothing").exit_code == 1
