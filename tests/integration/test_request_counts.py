"""Requests on S3 and PostgreSQL that do not grow with what lies behind: opening, and reading what is compacted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import psycopg
import pyarrow as pa
import pytest

import persist_lib as persist
from persist_lib.core.commands import Heartbeat
from persist_lib.format.digest import CHUNK
from persist_lib.ids import SeqNo
from persist_lib.location import open_location
from persist_lib.location.api import START_BYTES, Row
from persist_lib.location.objects.consensus import ObjectsConsensus
from persist_lib.location.wrap.metering import Meter, MeteredBlob
from persist_lib.runtime.ambient import Runtime
from persist_lib.shard.commit import Machine
from persist_lib.testing.faults import RecordingLocation
from tests import servers
from tests.faults.proxy import Proxy
from tests.worlds import SCHEMA, row

pytestmark = pytest.mark.slow
servers.use_test_credentials()
QUIET = Runtime(background=False)
AFTER = 10
"""Transitions after the newest rollup, in every history."""


class History(NamedTuple):
    """A shard as its location keeps it: all its rows, untruncated, and its objects."""

    rows: list[Row]
    objects: dict[str, bytes]


def renew_until(machine: Machine, id_: str, seqno: int) -> None:
    """Transitions that are cheap, and change something each."""
    while (newest := machine.version.seqno) < seqno:
        machine.commit(lambda _state, now, newest=newest: Heartbeat((id_,), now + 10**9 + newest))  # type: ignore[misc]


@pytest.fixture(scope="module")
def histories() -> dict[int, History]:
    """Of 100 and of 10,000 transitions: one shard at two moments, made in memory through the real commit loop."""
    found = {}
    config = persist.Config(rollup_every=1 << 30)
    with persist.open(f"memory:{os.urandom(8).hex()}", config=config, runtime=QUIET) as client:
        write = client.open_writer("s", SCHEMA)
        write.compare_and_append([row(1)], 0, 1)
        machine, id_ = client.machine("s"), write.id
        for wanted in (100, 10_000):
            renew_until(machine, id_, wanted - AFTER - 1)
            client.roll_up("s", force=True)
            renew_until(machine, id_, wanted)
            rows = client.consensus.scan("s", SeqNo(0), 10**6)
            objects = {entry.key: client.blob.get(entry.key) or b"" for entry in client.blob.list("s/")}
            found[wanted] = History(rows, objects)
    assert [len(history.rows) for history in found.values()] == [100, 10_000]
    return found


def postgres_of(history: History) -> str:
    """A database that holds it."""
    schema = f"t{os.urandom(8).hex()}"
    url = servers.postgres_at(persist_schema=schema)
    open_location("memory:", url, create=True).close()
    with psycopg.connect(servers.postgres_url()) as sql, sql.cursor() as cursor:
        newest = history.rows[-1]
        head = f"INSERT INTO {schema}.shard_head (key, seqno, start) VALUES ('s', %s, %s)"
        cursor.execute(head, (newest.seqno, newest.data[:START_BYTES]))
        with cursor.copy(f"COPY {schema}.shard_log (key, seqno, data) FROM STDIN (FORMAT binary)") as copy:
            copy.set_types(["text", "int8", "bytea"])
            for seqno, data in history.rows:
                copy.write_row(("s", seqno, data))
    return url


def truncated_in_s3(url: str, history: History) -> None:
    """Its newest rows only, as truncation to the newest rollup leaves them: a scan of objects lists what there is."""
    consensus = open_location(url, create=True).consensus
    assert isinstance(consensus, ObjectsConsensus)
    client, kept = consensus._objects.clients.get(), history.rows[-AFTER - 5 :]
    for seqno, data in kept:
        client.put_object(**consensus._objects.at(consensus._row("s", seqno)), Body=data)
    client.put_object(**consensus._objects.at(consensus._floor_of("s")), Body=str(kept[0].seqno).encode())
    consensus.close()


def s3_url(port: int | None = None, scheme: str = "s3", name: str | None = None) -> str:
    endpoint = f"http://127.0.0.1:{port or servers.s3_server().port}"
    return f"{scheme}://{servers.BUCKET}/{name or os.urandom(8).hex()}?endpoint={endpoint}&path_style=true"


def opening_on_the_wire(place: tuple[str, str | None], *proxies: Proxy) -> dict[str, int]:
    """What a new client asks to open the location and to know the shard's newest state: by kind, and on the wire."""
    for proxy in proxies:
        proxy.at(0, None)
    recording = RecordingLocation(open_location(*place))
    with persist.open(recording.location, runtime=QUIET) as client:
        version = client.inspect("s")
        requests = sum(proxy.requests for proxy in proxies)
        kinds = [request.kind for request in recording.requests]
    return {kind: kinds.count(kind) for kind in set(kinds)} | {"on the wire": requests, "newest": version.seqno}


@pytest.mark.timeout(240)
def test_opening_a_shard_of_10_000_transitions_takes_as_many_requests_as_one_of_100(
    histories: dict[int, History],
) -> None:
    with Proxy(servers.s3_server().port) as s3, Proxy(servers.postgres_port()) as sql:
        asked = []
        for transitions, history in histories.items():
            name, log = os.urandom(8).hex(), postgres_of(history)
            with open_location(s3_url(name=name), log, create=True) as location:
                for key, data in history.objects.items():
                    location.blob.set(key, data)
            through = s3_url(s3.port, name=name), log.replace(f":{servers.postgres_port()}/", f":{sql.port}/")
            counts = opening_on_the_wire(through, s3, sql)
            assert counts.pop("newest") == transitions
            asked.append(counts)
    assert asked[0] == asked[1]
    assert {kind: asked[0][kind] for kind in ("head", "scan", "get")} == {"head": 1, "scan": 1, "get": 1}
    assert asked[0]["on the wire"] <= 12


@pytest.mark.timeout(240)
def test_so_it_does_on_s3_alone_once_the_log_is_truncated(histories: dict[int, History]) -> None:
    with Proxy(servers.s3_server().port) as s3:
        asked = []
        for transitions, history in histories.items():
            name = os.urandom(8).hex()
            with open_location(s3_url(scheme="s3+cas", name=name), create=True) as location:
                for key, data in history.objects.items():
                    location.blob.set(key, data)
            truncated_in_s3(s3_url(scheme="s3+cas", name=name), history)
            counts = opening_on_the_wire((s3_url(s3.port, "s3+cas", name), None), s3)
            assert counts.pop("newest") == transitions
            asked.append(counts)
    assert asked[0] == asked[1]
    assert asked[0]["on the wire"] <= 40


def surveyed_on_the_wire(place: tuple[str, str | None], *proxies: Proxy) -> tuple[persist.Survey, int]:
    """A survey by a new client, and its requests on the wire, without those of opening the location."""
    with persist.open(*place, runtime=QUIET) as client:
        client.consensus.head("nobody")  # connects
        for proxy in proxies:
            proxy.at(0, None)
        found = client.survey()
        return found, sum(proxy.requests for proxy in proxies)


def test_a_survey_of_idle_shards_takes_four_requests_however_many_they_are() -> None:
    """The names, the looks and the pauses from S3, and all heads from PostgreSQL."""
    with Proxy(servers.s3_server().port) as s3, Proxy(servers.postgres_port()) as sql:
        name, log = os.urandom(8).hex(), servers.postgres_at(persist_schema=f"t{os.urandom(8).hex()}")
        through = s3_url(s3.port, name=name), log.replace(f":{servers.postgres_port()}/", f":{sql.port}/")
        counts = []
        for shards in (5, 50):
            with persist.open(s3_url(name=name), log, runtime=QUIET) as client:
                for n in range(shards):
                    client.open_writer(f"s{n}", SCHEMA).close()
                client.survey(done={"census": client.shards()})
            found, requests = surveyed_on_the_wire(through, s3, sql)
            assert (len(found.looks), found.waiting, found.due("census")) == (shards, 0, [])
            assert found.cost.requests == requests
            counts.append(requests)
    assert counts == [4, 4]


WIDE = persist.Schema(key={"id": "int64 not null"}, value={"payload": "binary", "small": "int32"})
WIDTH = 512
ROWS = 140_000
"""About 70 MiB that does not compress."""


class Compacted(NamedTuple):
    """A client of a shard that is one consolidated run, its size, and what is asked of Blob."""

    client: persist.Client
    meter: Meter
    size: int


@pytest.fixture(scope="module")
def compacted() -> Iterator[Compacted]:
    url, log = s3_url(), f"memory:{os.urandom(8).hex()}"
    random = np.random.default_rng(7)
    payload = pa.Array.from_buffers(
        pa.binary(), ROWS,
        [
            None, pa.py_buffer(np.arange(0, (ROWS + 1) * WIDTH, WIDTH, dtype=np.int32)),
            pa.py_buffer(random.bytes(ROWS * WIDTH)),
        ],
    )  # fmt: skip
    table = pa.table(
        {"id": pa.array(range(ROWS), pa.int64()), "payload": payload, "small": pa.array([7] * ROWS, pa.int32())}
    )
    with persist.open(url, log, runtime=QUIET) as client:
        write = client.open_writer("wide", WIDE)
        for n in range(2):
            write.compare_and_append(table.slice(n * ROWS // 2, ROWS // 2), n, n + 1)
        client.downgrade_hold("wide", "now", 1)
        client.maintain("wide", policy=persist.Policy(weight=1e9))
        state = client.inspect("wide").state
        parts = [part for batch in state.trace for part in batch.parts]
        assert len(parts) == 1
        meter, location = Meter(), open_location(url, log)
        metered = MeteredBlob(location.blob, meter)
        object.__setattr__(location, "blob", metered)
        with persist.open(location, runtime=QUIET) as reading:
            yield Compacted(reading, meter, parts[0].size)


def asked(compacted: Compacted, read: Callable[[persist.ReadHandle], Any]) -> tuple[Any, int, int]:
    """What `read` answers, the GETs that it took, and their bytes."""
    with compacted.client.open_reader("wide") as handle:
        compacted.meter.reset()
        answer = read(handle)
        counts = compacted.meter.counts()
    gets = [counts[kind] for kind in ("get", "get_range") if kind in counts]
    return answer, sum(count.calls for count in gets), sum(count.received_bytes for count in gets)


def test_a_snapshot_of_a_compacted_shard_takes_at_most_a_get_for_each_8_mib(compacted: Compacted) -> None:
    table, gets, received = asked(compacted, lambda read: read.snapshot(1).to_arrow())
    assert table.num_rows == ROWS
    assert compacted.size > 64 * 1024 * 1024
    assert gets <= -(-compacted.size // CHUNK)
    assert received == compacted.size


def test_one_key_is_read_from_the_chunks_of_its_row_group_alone(compacted: Compacted) -> None:
    table, gets, received = asked(compacted, lambda read: read.snapshot(1, key=[ROWS // 2]).to_arrow())
    assert table.num_rows == 1
    assert table["id"].to_pylist() == [ROWS // 2]
    assert gets <= 4, "a row group of 16 MiB, and the end of the object, which says where that is"
    assert received < compacted.size / 2


def test_a_range_of_keys_costs_about_its_share(compacted: Compacted) -> None:
    first, last = [ROWS // 4], [ROWS // 2]
    table, _, received = asked(compacted, lambda read: read.snapshot(1, key_from=first, key_to=last).to_arrow())
    assert table.num_rows == ROWS // 4
    assert received < compacted.size * 0.7


def test_columns_that_are_left_out_are_not_fetched(compacted: Compacted) -> None:
    table, gets, received = asked(compacted, lambda read: read.snapshot(1, columns=["id", "small"]).to_arrow())
    assert table.num_rows == ROWS
    assert table.column_names[:2] == ["id", "small"]
    assert gets <= 7, "the chunks where one row group ends and the next begins"
    assert received < compacted.size * 0.8
