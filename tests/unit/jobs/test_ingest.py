"""An ingest takes each line once, however often it is killed, and whoever else does the same."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import persist_lib as persist
from jobs.ingesting.inputs import find_files
from jobs.ingesting.planning import FilesChanged
from jobs.ingesting.running import Ingest
from jobs.ingesting.settings import Settings
from jobs.ingesting.work import Done, Work, run_task
from persist_lib.errors import Determinate, InvalidUsage, NotFound
from persist_lib.location.s3.objects import Clients
from tests.circles import by_day
from tests.unit.jobs.ingests import JSONL, SCHEMA, Killed, Kills, Reads, check, client_of, contents, run, write_files


def job(folder: Path, **more: object) -> Ingest:
    return Ingest("orders", [str(folder)], JSONL, SCHEMA, **more)  # type: ignore[arg-type]


def test_all_good_lines_are_rows_and_all_bad_ones_are_aside(tmp_path: Path) -> None:
    rows, bad = write_files(tmp_path / "in")
    reads = Reads()
    with client_of("memory:") as client:
        outcome = run(client, job(tmp_path / "in"), reads)
        check(client, "orders", rows, bad)
        assert outcome.tally.written == sum(rows.values())
        assert outcome.tally.bad == len(bad)
        assert outcome.groups > 2
        assert set(reads.chunks.values()) == {1}


@pytest.mark.parametrize("happens", [False, True])
def test_a_kill_at_any_request_doubles_and_loses_nothing(tmp_path: Path, happens: bool) -> None:
    rows, bad = write_files(tmp_path / "in")
    asked = job(tmp_path / "in")
    for at in by_day(range(1, 1 << 20), 4):
        url = f"memory:ingest-{tmp_path.name}-{happens}-{at}"
        kills = Kills(at, happens=happens)
        client, first = client_of(url, kills), Reads()
        try:
            run(client, asked, first)
        except Killed:
            pass
        else:
            break
        with client_of(url) as again:
            done = again.machine("orders").try_fetch()
            last = None if done is None else done.state.producers.get("ingest/default")
            before = 0 if last is None else last.sequence
            second = Reads()
            run(again, asked, second)
            check(again, "orders", rows, bad)
            groups = {row["number"]: row for row in contents(again, "orders_files") if row["kind"] == "group"}
            assert set(groups) == set(range(1, max(groups) + 1))
            if before == max(groups):
                assert not second.chunks, "committed groups are not read again"
    assert at > 20


def test_a_committed_group_is_not_read_again(tmp_path: Path) -> None:
    rows, bad = write_files(tmp_path / "in")
    url = f"memory:reads-{tmp_path.name}"
    asked, stops = job(tmp_path / "in"), []

    def until_the_third(work: Work, write: object) -> Done:
        stops.append(work)
        if len(stops) == 6:
            raise Killed
        return run_task(work, write)  # type: ignore[arg-type]

    with client_of(url) as client:
        with pytest.raises(Killed):
            run(client, asked, until_the_third)  # type: ignore[arg-type]
        last = client.inspect("orders").state.producers["ingest/default"].sequence
        assert last > 0
        second = Reads()
        run(client, asked, second)
        check(client, "orders", rows, bad)
        with client_of("memory:") as other:
            everything = Reads()
            run(other, asked, everything)
        assert sum(second.chunks.values()) < sum(everything.chunks.values())
        assert set(second.chunks.values()) == {1}


def test_two_ingests_of_the_same_input_at_once_take_it_once(tmp_path: Path) -> None:
    rows, bad = write_files(tmp_path / "in", files=5)
    url = f"file:{tmp_path / 'data'}"
    failures: list[BaseException] = []

    def one() -> None:
        try:
            with persist.open(url) as client:
                run(client, job(tmp_path / "in"))
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    with persist.open(url) as client:
        threads = [threading.Thread(target=one) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        check(client, "orders", rows, bad)


def test_only_new_files_are_taken_later(tmp_path: Path) -> None:
    rows, bad = write_files(tmp_path / "in")
    with client_of("memory:") as client:
        run(client, job(tmp_path / "in"))
        more, worse = write_files(tmp_path / "in", files=2, first=3)
        reads = Reads()
        outcome = run(client, job(tmp_path / "in"), reads)
        assert outcome.files == 2
        assert {Path(path).name[0] for path, _ in reads.chunks} == {"3", "4"}
        check(client, "orders", rows + more, bad | worse)
        assert run(client, job(tmp_path / "in")).files == 0


def test_a_file_that_changed_since_it_was_taken_is_refused_or_taken_or_left(tmp_path: Path) -> None:
    rows, bad = write_files(tmp_path / "in")
    with client_of("memory:") as client:
        run(client, job(tmp_path / "in"))
        (tmp_path / "in/0.jsonl").write_text('{"id": 1, "name": "new"}\n')
        with pytest.raises(FilesChanged, match=r"0\.jsonl"):
            run(client, job(tmp_path / "in"))
        assert run(client, job(tmp_path / "in", changed="skip")).files == 0
        check(client, "orders", rows, bad)
        assert run(client, job(tmp_path / "in", changed="take")).files == 1
        rows[1, "new"] += 1
        check(client, "orders", rows, bad)
        assert run(client, job(tmp_path / "in")).files == 0


def test_a_file_that_changes_while_it_is_taken_stops_the_run_and_nothing_is_half_done(tmp_path: Path) -> None:
    write_files(tmp_path / "in")
    path = tmp_path / "in/2.jsonl"
    former, times = path.read_bytes(), path.stat()

    def changing(work: Work, write: object) -> Done:
        if any(file.path == str(path) for file in work.files.values()):
            path.write_text("{}")
        return run_task(work, write)  # type: ignore[arg-type]

    with client_of("memory:") as client:
        with pytest.raises(InvalidUsage, match="has changed"):
            run(client, job(tmp_path / "in"), changing)  # type: ignore[arg-type]
        path.unlink()
        with pytest.raises(NotFound, match="is gone"):
            run(client, job(tmp_path / "in"))
        path.write_bytes(former)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        run(client, job(tmp_path / "in"))
        check(client, "orders", *write_files(tmp_path / "in"))


def test_a_run_goes_on_without_a_file_that_is_lost_if_that_is_allowed(tmp_path: Path) -> None:
    rows, _ = write_files(tmp_path / "in")

    def losing(work: Work, write: object) -> Done:
        (tmp_path / "in/2.jsonl").unlink(missing_ok=True)
        return run_task(work, write)  # type: ignore[arg-type]

    with client_of("memory:") as client:
        run(client, job(tmp_path / "in", lost="bad"), losing)  # type: ignore[arg-type]
        left = {key: count for key, count in rows.items() if not key[1].startswith("2-")}
        assert {(row["id"], row["name"]): row["_diff"] for row in contents(client, "orders")} == left
        lost = [row for row in contents(client, "orders_bad") if "were not read" in row["reason"]]
        assert {Path(row["file"]).name for row in lost} == {"2.jsonl"}
        assert run(client, job(tmp_path / "in")).files == 0


def test_a_run_is_continued_only_with_its_own_settings(tmp_path: Path) -> None:
    rows, bad = write_files(tmp_path / "in")

    def dying(work: Work, write: object) -> Done:
        raise Killed

    with client_of("memory:") as client:
        with pytest.raises(Killed):
            run(client, job(tmp_path / "in"), dying)  # type: ignore[arg-type]
        other = Ingest("orders", [str(tmp_path / "in")], Settings("jsonl", extra="ignore"), SCHEMA)
        with pytest.raises(InvalidUsage, match="other settings"):
            run(client, other)
        run(client, job(tmp_path / "in"))
        check(client, "orders", rows, bad)


def test_ingests_of_other_names_take_the_same_files_again(tmp_path: Path) -> None:
    rows, bad = write_files(tmp_path / "in")
    with client_of("memory:") as client:
        run(client, job(tmp_path / "in"))
        run(client, job(tmp_path / "in", name="second", bad="orders_more"))
        assert {row["_diff"] for row in contents(client, "orders")} == {2}
        assert len(contents(client, "orders_more")) == len(bad)
        assert len(contents(client, "orders")) == len(rows)


def test_a_forgotten_producer_is_noticed(tmp_path: Path) -> None:
    write_files(tmp_path / "in")
    with client_of("memory:") as client:
        run(client, job(tmp_path / "in"))
        client.forget_producer(
            "orders", "ingest/default", expected=client.inspect("orders").state.producers["ingest/default"].sequence
        )
        with pytest.raises(InvalidUsage, match="forgotten"):
            run(client, job(tmp_path / "in"))


def test_wrong_inputs_and_names_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/notes.md").write_text("x")
    with client_of("memory:") as client:
        for inputs, error in (
            ([str(tmp_path / "none")], NotFound),
            ([str(tmp_path / "in")], NotFound),
            ([""], InvalidUsage),
            ([str(tmp_path / "*.jsonl")], NotFound),
        ):
            with pytest.raises(error):
                find_files(inputs, "jsonl")
        with pytest.raises(InvalidUsage, match="three shards"):
            run(client, job(tmp_path / "in", bad="orders"))
        assert client.shards() == []


def test_a_listing_of_s3_that_was_cut_short_is_no_empty_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut:
        def list_objects_v2(self, **_: object) -> dict[str, object]:
            return {}

    monkeypatch.setattr(Clients, "get", lambda _self: Cut())
    monkeypatch.setattr("jobs.ingesting.inputs.PATIENCE_S", 0.0)
    with pytest.raises(Determinate, match="cut short"):
        find_files(["s3://bucket/in/"], "jsonl")
