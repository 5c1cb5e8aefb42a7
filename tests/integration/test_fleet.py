"""A fleet moves to the next format machine by machine, as docs/operations.md says, and loses nothing.

Old and new are two installed wheels: this release, and one with a next format. The old one refuses the new before it
does anything, the new one reads the old. While columns evolve, the old one is from the history of this project.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.core.formats import CREATED, NEWEST
from tests import built
from tests.conformance.stores import CONSENSUSES
from tests.integration import fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WORKER = Path(__file__).with_name("fleet_worker.py")
SHARD = "orders"


@pytest.fixture(scope="session")
def old(tmp_path_factory: pytest.TempPathFactory, wheels: built.Wheels) -> Path:
    return built.install(tmp_path_factory.mktemp("old") / "env", wheels["persist-lib"])


@pytest.fixture(scope="session")
def new(tmp_path_factory: pytest.TempPathFactory, shared_folder: Path) -> Path:
    next_one = built.Wheels(built.shared(shared_folder / "next", fleet.build_next))
    return built.install(tmp_path_factory.mktemp("new") / "env", next_one["persist-lib"])


@pytest.fixture(scope="session")
def before(tmp_path_factory: pytest.TempPathFactory, shared_folder: Path) -> Path:
    """The last release that knows no columns that evolve, from this project's history."""
    if not fleet.has_history():
        pytest.skip("not run: this clone has no history")
    wheels = built.Wheels(built.shared(shared_folder / "before", fleet.build_before))
    return built.install(tmp_path_factory.mktemp("before") / "env", wheels["persist-lib"])


class Place:
    """A location, and what programs of either release do there."""

    def __init__(self, url: str, consensus: str) -> None:
        self.url, self.consensus = url, consensus
        self.machines: list[Machine] = []

    def persist(self, release: Path, *words: str) -> Any:
        """What the command answers as JSON; also when it fails."""
        where = ["--location", self.url, *(["--consensus", self.consensus] if self.consensus else [])]
        command = [str(release / "persist"), "--json", *where, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        said = json.loads(done.stdout or done.stderr)
        return {**said, "code": done.returncode}

    def python(self, release: Path, program: str) -> str:
        start = f"import persist_lib as persist; client = persist.open({self.url!r}, {self.consensus or None!r}); "
        command = [str(release / "python"), "-c", start + program]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd="/").stdout.strip()

    def start(self, release: Path, prefix: str) -> Machine:
        machine = Machine(self, release, prefix)
        self.machines.append(machine)
        return machine

    def everything(self) -> tuple[object, ...]:
        """All rows and all keys."""
        with persist.open(self.url, self.consensus or None, read_only=True) as client:
            rows = [row.data for row in client.consensus.scan(SHARD, 0, 100_000)]  # type: ignore[arg-type]
            return (rows, sorted(entry.key for entry in client.blob.list(f"{SHARD}/")))


class Machine:
    """A machine of the fleet that appends all the time."""

    def __init__(self, place: Place, release: Path, prefix: str) -> None:
        command = [str(release / "python"), str(WORKER), place.url, place.consensus, SHARD, prefix]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/")
        self.said: list[list[Any]] = []
        self.acked: list[str] = []
        self.until("ready", "newer")

    def until(self, *kinds: str) -> list[Any]:
        """The next thing of these kinds that it says."""
        assert self.process.stdout
        for line in self.process.stdout:
            said = json.loads(line)
            self.said.append(said)
            if said[0] == "acked":
                self.acked.append(said[1])
            if said[0] in kinds:
                return said
        raise AssertionError(f"it ended without {kinds}: {self.said[-3:]}")

    def gets_on(self, appends: int = 5) -> None:
        for _ in range(appends):
            self.until("acked")

    def stop(self) -> str:
        """How it ended."""
        assert self.process.stdin
        self.process.stdin.close()
        how = self.until("stopped", "newer")[0]
        assert self.process.wait(30) == 0
        return str(how)


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    url = CONSENSUSES[request.param].prepare(tmp_path)
    made = Place(url, "") if request.param == "sqlite" else Place(f"file:{tmp_path}/blobs", url)
    yield made
    for machine in made.machines:
        with machine.process:  # closes its pipes and waits for it
            if machine.process.poll() is None:
                machine.process.kill()


IDS = (
    f"read = client.open_reader({SHARD!r}); upper = read.fetch_upper().time; "
    "print('\\n'.join(row['id'] for row in read.snapshot(upper - 1).to_pylist()))"
)


def test_a_live_fleet_moves_to_the_next_format_machine_by_machine(place: Place, old: Path, new: Path) -> None:
    persist.open(place.url, place.consensus or None).close()
    machines = [place.start(old, "a"), place.start(old, "b")]
    for machine in machines:
        machine.gets_on()
    # 1. The new release on one machine after the other; the shard stays as it is.
    for number, prefix in enumerate("cd"):
        assert machines[number].stop() == "stopped"
        machines.append(place.start(new, prefix))
        machines[-1].gets_on()
    assert place.persist(old, "shard", "show", SHARD)["code"] == 0, "what new programs write, old ones still read"
    for release in (new, old):
        assert place.persist(release, "maintain", SHARD)["code"] == 0, "and maintain, as it was not told to move"
    (dry,) = place.persist(new, "shard", "upgrade", "--all", "--dry-run")["shards"]
    assert (dry["before"], dry["after"]) == (CREATED, NEWEST + 1)
    # One machine was forgotten, and appends with the old release.
    forgotten = place.start(old, "e")
    forgotten.gets_on()
    # 2. All machines know the next format: the shards are told to move up, while everybody continues.
    (done,) = place.persist(new, "shard", "upgrade", SHARD)["shards"]
    assert (done["before"], done["after"]) == (CREATED, NEWEST + 1)
    assert place.persist(new, "shard", "upgrade", SHARD)["shards"][0]["before"] == NEWEST + 1, "twice is no error"
    told = forgotten.until("newer")[1]
    assert "upgrade persist_lib on this machine" in told
    assert forgotten.process.wait(30) == 0
    for machine in machines[2:]:
        machine.gets_on(20)
        assert machine.stop() == "stopped"
    # 3. What only the next format can say.
    place.python(new, f"from persist_lib.core import commands as c; "
                 f"client.machine({SHARD!r}).commit(lambda s, n: c.SetLabel('x'))")  # fmt: skip
    maintained = place.persist(new, "maintain", SHARD)
    assert maintained["code"] == 0, maintained
    assert place.python(new, f"print(client.inspect({SHARD!r}).state.label)") == "x"
    acked = sorted(id_ for machine in [*machines, forgotten] for id_ in machine.acked)
    there = sorted(place.python(new, IDS).split("\n"))
    assert len(set(there)) == len(there), "each once"
    assert set(acked) <= set(there), "what was acknowledged is there"
    assert len(there) - len(acked) <= len(machines) + 1, "at most what was under way when its machine stopped"


def test_an_old_program_refuses_the_next_format_before_it_does_anything(place: Place, old: Path, new: Path) -> None:
    persist.open(place.url, place.consensus or None).close()
    machine = place.start(old, "a")
    machine.gets_on(20)
    assert machine.stop() == "stopped"
    place.persist(new, "shard", "upgrade", SHARD)
    place.persist(new, "maintain", SHARD, "--only", "rollups", "--force")
    before = place.everything()
    for words in (
        ["shard", "show", SHARD], ["shard", "log", SHARD, "--limit", "100"], ["read", SHARD], ["maintain", SHARD],
        *(["maintain", SHARD, "--only", duty] for duty in ("garbage", "orphans", "leases")),
        ["hold", "set", SHARD, "h"], ["drop", SHARD, "--yes"], ["shard", "repair", SHARD, "--yes"],
        ["shard", "upgrade", SHARD],
    ):  # fmt: skip
        answer = place.persist(old, *words)
        assert answer["code"] == 3, (words, answer)
        assert "NewerFormat" in json.dumps(answer), words
    assert place.start(old, "b").said[-1][0] == "newer"
    assert place.everything() == before
    assert place.persist(new, "shard", "show", SHARD)["code"] == 0


def test_an_older_release_beside_columns_that_evolve(place: Place, before: Path, old: Path) -> None:
    """It appends and reads on while columns are added that may be null; what it cannot know it refuses."""
    persist.open(place.url, place.consensus or None).close()
    machines = [place.start(before, "a"), place.start(old, "b")]
    for machine in machines:
        machine.gets_on()
    added = place.persist(old, "evolve", SHARD, "--add", "note:string")
    assert added["code"] == 0, added
    for machine in machines:
        machine.gets_on(10)
    seen = set(place.python(before, IDS).split())
    assert {*machines[0].acked[:15], *machines[1].acked[:15]} <= seen, "the older release reads all rows"
    evolved = place.persist(old, "evolve", SHARD, "--add", "channel:string not null", "--default", "channel=web")
    assert evolved["code"] == 0, evolved
    assert "upgrade persist_lib on this machine" in machines[0].until("newer")[1]
    assert machines[0].process.wait(30) == 0
    machines[1].gets_on(20)
    assert machines[1].stop() == "stopped", "a program with the older columns, of this release"
    there = place.everything()
    for words in (["read", SHARD], ["shard", "show", SHARD], ["maintain", SHARD], ["drop", SHARD, "--yes"]):
        answer = place.persist(before, *words)
        assert answer["code"] == 3, (words, answer)
        assert "NewerFormat" in json.dumps(answer), words
    assert place.start(before, "c").said[-1][0] == "newer"
    assert place.everything() == there
    with persist.open(place.url, place.consensus or None) as client:
        rows = client.table(SHARD).read().to_pylist()
    assert {(row["note"], row["channel"]) for row in rows} == {(None, "web")}
    found = [row["id"] for row in rows]
    assert len(set(found)) == len(found), "each once"
    acked = {*machines[0].acked, *machines[1].acked}
    assert acked <= set(found), "what was acknowledged is there"
    assert len(found) - len(acked) <= len(machines)
