"""Locations are opened by URL, the same in every process, and nothing is made or touched that should not be.

A location takes time, sleep, random numbers and threads from the runtime it is opened with, and from no other.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import Corrupt, HistoryRegressed, InvalidUsage, Missing, NewerFormat, NotFound
from persist_lib.ids import SeqNo
from persist_lib.location import Location, Scheme, open_location
from persist_lib.location import open as opening
from persist_lib.location.file.blob import DELETE_CHUNK
from persist_lib.location.memory.location import MemoryBlob, MemoryConsensus
from persist_lib.location.objects.blob import MULTIPART_ABOVE
from persist_lib.location.wrap.around import ReadOnlyConsensus, takes_commands
from persist_lib.location.wrap.metering import Meter, MeteredConsensus
from persist_lib.runtime.ambient import Runtime
from persist_lib.testing import ManualClock
from tests import servers
from tests.logs import after
from tests.worlds import SCHEMA, row

ROOT = Path(__file__).parents[3]


def tree(path: Path) -> dict[str, tuple[int, int]]:
    return {str(p.relative_to(path)): (p.stat().st_size, p.stat().st_mtime_ns) for p in path.rglob("*")}


def test_a_file_location_has_its_blobs_and_its_consensus_where_it_is_told(tmp_path: Path) -> None:
    with open_location(f"file:{tmp_path}/data", create=True) as location:
        location.blob.set("s/w/part", b"x")
        location.consensus.compare_and_set("s", None, b"x")
    assert (tmp_path / "data/blob/s/w/part").read_bytes() == b"x"
    assert (tmp_path / "data/consensus.sqlite").exists()
    assert json.loads((tmp_path / "data/persist.json").read_text()) == {"format": 1}


@pytest.mark.parametrize(
    "form",
    [
        "file:{0}/a",
        "file://{0}/a",
        "file:./a",
        "file:a",
        "file:b/../a",
        "file:{0}//a/",
        "{0}/a",
        "/{0}/a",
        "./a",
        "a",
        "b/../a",
        "a/",
        Path("a"),
        Path("b/../a"),
        Path("./a"),
    ],
)
def test_every_form_of_a_path_means_one_absolute_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str | Path
) -> None:
    monkeypatch.chdir(tmp_path)
    place = form.format(tmp_path) if isinstance(form, str) else form
    with pytest.raises(NotFound):
        open_location(place)
    assert not tree(tmp_path), "what is only looked for is not made"
    with open_location(place, create=True) as location:
        assert location.url == location.consensus_url == f"file:{tmp_path}/a"
    with open_location(tmp_path / "a", place) as again:
        assert again.consensus_url == f"file:{tmp_path}/a"


@pytest.mark.parametrize(
    ("place", "hint"),
    [("memory", "did you mean 'memory:'"), ("s3", "scheme"), ("C:\\data", "scheme"), ("C:/data", "scheme"),
     (".\\data", "slashes"), ("~/data", "home"), ("user@host/db", "postgresql"), (b"data", "URL"),
     ("data:x", "scheme")],
)  # fmt: skip
def test_what_is_rather_no_path_is_refused_and_made_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidUsage, match=hint):
        open_location(place, create=True)
    with pytest.raises(InvalidUsage):
        open_location("memory:", place, create=True)
    assert not tree(tmp_path)


@pytest.mark.parametrize("url", ["file:", "file://", "file://host/x", "", " ", "nosuch:x", "memory", None, 7])
def test_what_is_no_url_of_a_location_is_refused(url: Any) -> None:
    with pytest.raises(InvalidUsage):
        open_location(url, create=True)


def test_odd_paths_are_taken_literally(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/with space/50%20?mode=memory#x/ü"
    with open_location(url, create=True) as location:
        location.consensus.compare_and_set("s", None, b"x")
        location.blob.set("s/x", b"x")
    assert (tmp_path / "with space/50%20?mode=memory#x/ü/consensus.sqlite").exists()
    with open_location(url, read_only=True) as location:
        assert location.consensus.head("s") == (1, b"x")


@pytest.mark.parametrize("read_only", [False, True])
def test_a_location_that_is_not_there_is_not_found_and_not_made(tmp_path: Path, read_only: bool) -> None:
    url = f"file:{tmp_path}/a/b"
    with pytest.raises(NotFound, match="create=True") as error:
        open_location(url, read_only=read_only)
    assert url in str(error.value)
    assert tree(tmp_path) == {}


def test_read_only_creates_nothing_even_if_told_to(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        open_location(f"file:{tmp_path}/a", create=True, read_only=True)
    assert tree(tmp_path) == {}


def test_a_newer_format_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    (tmp_path / "persist.json").write_text('{"format": 2}')
    before = tree(tmp_path)
    for options in ({"create": True}, {}, {"read_only": True}):
        with pytest.raises(NewerFormat) as error:
            open_location(f"file:{tmp_path}", **options)  # type: ignore[arg-type]
        assert error.value.fields == {"found": 2, "known": 1}
    assert tree(tmp_path) == before


def test_a_damaged_marker_is_damage(tmp_path: Path) -> None:
    (tmp_path / "persist.json").write_text("{")
    with pytest.raises(Corrupt):
        open_location(f"file:{tmp_path}", create=True)


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    before = tree(tmp_path)
    with pytest.raises(InvalidUsage, match="thesis"):
        open_location(f"file:{tmp_path}", create=True)
    assert tree(tmp_path) == before


def test_a_lost_database_is_damage_and_not_an_empty_one(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/data"
    with open_location(url, create=True) as location:
        location.blob.set("s/x", b"x")
    (tmp_path / "data/consensus.sqlite").unlink()
    for options in ({"create": True}, {}, {"read_only": True}):
        with pytest.raises(Missing, match="consensus"):
            open_location(url, **options)  # type: ignore[arg-type]


def test_a_creation_that_was_interrupted_is_finished_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "persist.json").write_text('{"format": 1}')
    with pytest.raises(NotFound):
        open_location(f"file:{tmp_path}")
    open_location(f"file:{tmp_path}", create=True).close()
    open_location(f"file:{tmp_path}").close()


def test_read_only_touches_nothing(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/data"
    with open_location(url, create=True) as location:
        location.blob.set("s/x", b"x")
        location.consensus.compare_and_set("s", None, b"x")
    before = tree(tmp_path)
    with open_location(url, read_only=True) as reader:
        assert reader.blob.get("s/x") == b"x"
        assert reader.consensus.head("s") == (1, b"x")
        with pytest.raises(InvalidUsage):
            reader.blob.set("s/y", b"y")
        with pytest.raises(InvalidUsage):
            reader.consensus.compare_and_set("s", after(1), b"y")
    assert tree(tmp_path) == before


def test_a_pickled_location_opens_in_another_process_from_another_directory(tmp_path: Path) -> None:
    url = f"file:{tmp_path}/data"
    with open_location(url, create=True) as location:
        location.blob.set("s/x", b"from here")
        program = "import pickle, sys; print(pickle.load(sys.stdin.buffer).blob.get('s/x').decode())"
        run = subprocess.run(
            [sys.executable, "-c", program], input=pickle.dumps(location), capture_output=True, check=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert run.stdout.decode().strip() == "from here"


def test_a_pickled_location_stays_read_only_and_keeps_both_urls(tmp_path: Path) -> None:
    a, b = f"file:{tmp_path}/a", f"file:{tmp_path}/b"
    open_location(a, b, create=True).close()
    with open_location(a, b, read_only=True) as location:
        again = pickle.loads(pickle.dumps(location))
    assert again == location
    assert (again.url, again.consensus_url, again.read_only) == (a, b, True)
    assert not (tmp_path / "a/consensus.sqlite").exists()
    again.close()


def test_each_unnamed_memory_is_new_and_a_named_one_is_shared() -> None:
    one, two = open_location("memory:"), open_location("memory:")
    one.blob.set("s/x", b"x")
    assert two.blob.get("s/x") is None
    named = open_location("memory:shared-by-name", create=True)
    named.blob.set("s/x", b"x")
    named.close()
    del named
    gc.collect()
    assert open_location("memory:shared-by-name").blob.get("s/x") == b"x"
    with pytest.raises(NotFound):
        open_location("memory:never-made")


def test_an_unnamed_memory_pickles_within_the_process_and_is_gone_with_its_last_user() -> None:
    location = open_location("memory:")
    location.blob.set("s/x", b"x")
    pickled = pickle.dumps(location)
    again = pickle.loads(pickled)
    assert again.blob.get("s/x") == b"x"
    del location, again
    gc.collect()
    with pytest.raises(NotFound):
        pickle.loads(pickled)


@pytest.mark.parametrize("url", ["memory:", "file:{0}/data"])
def test_the_clock_of_an_embedded_consensus_is_an_argument(tmp_path: Path, url: str) -> None:
    clock = ManualClock(7_000_000_000)
    with open_location(url.format(tmp_path), create=True, clock=clock) as location:
        assert location.consensus.now() == 7000


def test_other_packages_add_schemes_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "entry_points", lambda group: [EntryPoint("mine", f"{__name__}:MINE", group)])
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys)
    monkeypatch.setattr(sys.modules[__name__], "MINE", MINE, raising=False)
    location = open_location("mine:there", "memory:")
    assert isinstance(location, Location)
    assert isinstance(location.blob, MemoryBlob)
    assert isinstance(location.consensus, MemoryConsensus)
    with pytest.raises(InvalidUsage, match="consensus="):
        open_location("mine:there")
    with pytest.raises(InvalidUsage, match="mine:"):
        open_location("other:there")


MINE = Scheme(blob=lambda _url, _opening: MemoryBlob())


def test_a_consensus_that_only_reads_hears_and_stays_in_place_as_the_one_that_it_wraps() -> None:
    class Known(MemoryConsensus):
        def heard(self, longest_s: float) -> dict[str, SeqNo]:
            return {"s": SeqNo(3)}

        def check_in_place(self) -> None:
            raise HistoryRegressed("it was replaced", path="x")

        def commit_commands(self, *_: object, **__: object) -> Any:
            raise AssertionError("nothing is written")

    wrapped = Known()
    consensus = MeteredConsensus(ReadOnlyConsensus(wrapped), Meter())
    assert consensus.heard(0.0) == {"s": SeqNo(3)}
    with pytest.raises(HistoryRegressed):
        consensus.check_in_place()
    assert takes_commands(MeteredConsensus(wrapped, Meter())) is not None
    assert takes_commands(consensus) is None, "what it is asked for as commands it could not refuse as rows"


servers.use_test_credentials()

Place = tuple[str, str | None]


def _on_s3(_: Path, scheme: str = "s3+cas") -> Place:
    name = os.urandom(8).hex()
    return f"{scheme}://{servers.BUCKET}/{name}?endpoint={servers.s3_server().url}&path_style=true", None


def _on_servers(path: Path) -> Place:
    return _on_s3(path, "s3")[0], servers.postgres_at(persist_schema=f"t{os.urandom(8).hex()}")


PLACES: list[object] = [
    pytest.param(lambda _: ("memory:", None), id="memory"),
    pytest.param(lambda path: (f"file:{path}/data", None), id="file"),
    pytest.param(_on_s3, id="s3+cas", marks=pytest.mark.slow),
    pytest.param(_on_servers, id="s3 and postgresql", marks=pytest.mark.slow),
]


def seeded(seed: int) -> Runtime:
    return Runtime(random=random.Random(seed), background=False)


def work(place: Place, runtime: Runtime) -> None:
    """Everything for which a store needs a random number, a pause or threads."""
    config = persist.Config(inline_bytes=0)
    with persist.open(*place, config=config, runtime=runtime) as client:
        write, read = client.open_shard("s", SCHEMA)
        for time_ in range(3):
            write.compare_and_append([row(time_, time=time_)], time_, time_ + 1)
        with read.snapshot(2) as snapshot:
            assert snapshot.to_arrow().num_rows == 3
        blob = client.location.blob
        blob.set("s/w/large", bytes(MULTIPART_ABOVE + 1))
        keys = [f"s/w/{n}" for n in range(2 * DELETE_CHUNK)]
        for key in keys:
            blob.set(key, b"")
        assert blob.delete_many([*keys, "s/w/large"]) == {}


@pytest.mark.parametrize("place_in", PLACES)
def test_no_driver_takes_anything_ambient_from_elsewhere(
    place_in: Callable[[Path], Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, runtime = place_in(tmp_path), seeded(7)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a runtime or a pool of its own")

    monkeypatch.setattr(Runtime, "__post_init__", refuse)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    monkeypatch.setattr(random, "SystemRandom", refuse)
    monkeypatch.setattr(time, "sleep", refuse)
    work(place, runtime)


@pytest.mark.parametrize("url", ["memory:", "file:{0}/{1}"])
def test_the_same_seed_draws_the_same_in_embedded_locations(tmp_path: Path, url: str) -> None:
    one, two = seeded(7), seeded(7)
    work((url.format(tmp_path, "one"), None), one)
    work((url.format(tmp_path, "two"), None), two)
    assert one.random.getstate() == two.random.getstate()


def test_unnamed_memories_of_the_same_seed_are_two() -> None:
    with open_location("memory:", runtime=seeded(7)) as one, open_location("memory:", runtime=seeded(7)) as two:
        one.blob.set("s/x", b"x")
        assert one.url != two.url
        assert two.blob.get("s/x") is None
