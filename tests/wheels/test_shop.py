"""The project examples/shop: what its files say, its tests where it is installed from wheels, and its processes.

Those of its compose file are started here without containers.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import psycopg
import pytest
import yaml
from packaging.requirements import Requirement
from pydantic import BaseModel, ConfigDict, StringConstraints

from persist_lib.testing.servers import free_port
from tests import built, servers
from tests.orchestration.dagster_dev import DagsterDev, end_group, is_up, restore_interrupts, wait_until

SHOP = built.ROOT / "examples" / "shop"
Seconds = Annotated[str, StringConstraints(pattern=r"^\d+s$")]
Published = Annotated[str, StringConstraints(pattern=r"^127\.0\.0\.1:\d+:\d+$")]
Value = Annotated[str, StringConstraints(pattern=r"^[^$]*(\$\{\w+:\?[\w ]+\})?[^$]*$")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Healthcheck(Strict):
    test: list[str]
    interval: Seconds
    timeout: Seconds = "30s"
    retries: int


class Condition(Strict):
    condition: Literal["service_started", "service_healthy", "service_completed_successfully"]


class Build(Strict):
    context: str
    dockerfile: str


class Service(Strict):
    """The part of the compose specification that the shop uses."""

    image: str
    build: Build | None = None
    restart: Literal["unless-stopped"]
    command: list[str] = []
    environment: dict[str, Value] = {}
    ports: list[Published] = []
    volumes: list[str] = []
    depends_on: dict[str, Condition] = {}
    healthcheck: Healthcheck | None = None


class Compose(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    services: dict[str, Service]
    volumes: dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def compose() -> Compose:
    return Compose.model_validate(yaml.safe_load((SHOP / "compose.yaml").read_text()))


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, with their lines joined."""
    text = re.sub(r"\\\n\s*", " ", (SHOP / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_compose_file_is_what_the_specification_allows_and_refers_to_what_there_is(compose: Compose) -> None:
    for name, service in compose.services.items():
        for other, wanted in service.depends_on.items():
            has_check = compose.services[other].healthcheck is not None
            assert has_check or wanted.condition != "service_healthy", (name, other)
        named = {one.partition(":")[0] for one in service.volumes if not one.startswith(".")}
        assert named <= compose.volumes.keys()
        assert service.image.rpartition(":")[2] not in ("", "latest")
        if service.build is not None:
            context = SHOP / service.build.context
            assert (context / service.build.dockerfile).resolve() == SHOP / "Dockerfile"
    secrets = [value for one in compose.services.values() for key, value in one.environment.items() if "PASS" in key]
    assert len(secrets) == 5
    assert set(secrets) == {"${SHOP_DB_PASSWORD:?a password for PostgreSQL}"}, "no password is in the file"
    runs = {name for name, service in compose.services.items() if "PERSIST_LOCATION" in service.environment}
    assert runs == {"code", "page"}
    assert all("data:/data" in compose.services[name].volumes for name in runs)


def test_the_dockerfile_keeps_the_rules_of_images() -> None:
    found = instructions()
    assert {word for word, _ in found} <= {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "CMD"}, (
        "no ADD, no MAINTAINER"
    )
    assert re.fullmatch(r"[a-z]+:[\w.-]+", found[0][1]), "a tag, and not the newest"
    users = [index for index, (word, _) in enumerate(found) if word == "USER"]
    assert found[users[-1]][1] not in ("root", "0")
    assert not [rest for word, rest in found[users[-1] :] if word == "RUN"], (
        "nothing is installed by the program's user"
    )
    for word, rest in found:
        if word == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert (
                rest.index("apt-get update") < rest.index("apt-get install") < rest.index("rm -rf /var/lib/apt/lists")
            )
        if word == "RUN" and "pip install" in rest:
            assert "--no-cache-dir" in rest
            assert "--constraint" in rest
        if word == "COPY":
            *sources, _ = shlex.split(rest)
            assert all(one.startswith("dist/") or (built.ROOT / one).exists() for one in sources)
        if word == "CMD":
            assert isinstance(json.loads(rest), list), "the program gets signals itself"
        assert "PASSWORD" not in rest
        assert "sudo" not in rest


def test_the_pins_that_the_dockerfile_makes_are_constraints_that_pip_takes() -> None:
    (makes,) = [found[1] for _, rest in instructions() if (found := re.search(r"(sed .*) constraints\.txt", rest))]
    (copied,) = [
        rest.split()[0] for word, rest in instructions() if word == "COPY" and rest.endswith("constraints.txt")
    ]
    command = ["bash", "-c", f"{makes} {copied}"]
    done = subprocess.run(command, cwd=built.ROOT, capture_output=True, text=True, check=True)
    lines = (line.partition("#")[0].strip() for line in done.stdout.splitlines())
    pins = [Requirement(line) for line in lines if line]
    assert {"pyarrow", "dagster", "dagster-postgres", "pyspark"} <= {one.name for one in pins}
    assert not [one for one in pins if one.extras or not str(one.specifier).startswith("==")]


def test_programs_and_modules_that_the_files_start_are_there(compose: Compose) -> None:
    (start,) = [json.loads(rest) for word, rest in instructions() if word == "CMD"]
    commands = [start, *(service.command for service in compose.services.values() if service.command)]
    there = {path.name for path in Path(sys.executable).parent.iterdir()}
    for program, *words in commands:
        assert program in there
        modules = [words[at + 1] for at, word in enumerate(words) if word in ("-m", "--module-name")]
        assert all((SHOP / f"{module.replace('.', '/')}.py").exists() for module in modules)


@pytest.fixture(scope="session")
def installed(wheels: built.Wheels, shared_folder: Path) -> Path:
    """The `bin` of an environment with the wheels of Persist and of the shop."""

    def make(place: Path) -> None:
        source = place / "source"
        source.mkdir()
        for name in ("pyproject.toml", "shop"):
            target = source / name
            command = ["cp", "-r", str(SHOP / name), str(target)]
            subprocess.run(command, check=True)
        build = [built.UV, "build", "--quiet", "--wheel", "--no-build-isolation", "--offline"]
        subprocess.run([*build, "--python", sys.executable, "--out-dir", str(place), str(source)], check=True)
        (wheel,) = place.glob("shop-*.whl")
        built.install(place / "env", *wheels.everything(), wheel)

    return built.shared(shared_folder / "shop", make) / "env" / "bin"


def run_tests(installed: Path, folder: Path, *words: str) -> None:
    environ = built.bare_environ(PATH=f"{installed}:{os.environ['PATH']}", DAGSTER_HOME=str(folder))
    command = [str(installed / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *words, str(SHOP / "tests")]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.slow
@pytest.mark.dagster
@pytest.mark.timeout(600)
def test_its_tests_pass_where_it_is_installed_from_wheels(installed: Path, tmp_path: Path) -> None:
    run_tests(installed, tmp_path, "-m", "not spark")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_its_tests_on_spark_pass_there_too(installed: Path, tmp_path: Path) -> None:
    run_tests(installed, tmp_path, "-m", "spark")


ENTRY = """
import sys
from importlib.metadata import entry_points
program, *_ = entry_points(group="console_scripts", name=sys.argv[1])
sys.argv = sys.argv[1:]
sys.exit(program.load()())
"""


def program_of(installed: Path, program: str, *words: str) -> list[str]:
    """A program by the interpreter of the environment, which has what the programs' own files name another one."""
    python = str(installed / "python")
    return [python, *words] if program == "python" else [python, "-c", ENTRY, program, *words]


@contextmanager
def started(command: list[str], environ: Mapping[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process, until the block ends."""
    with (folder / "log").open("ab") as log:
        one = subprocess.Popen(
            command, env=environ, cwd=folder, stdout=log, stderr=log,
            preexec_fn=restore_interrupts, start_new_session=True,  # noqa: PLW1509 - it takes no lock
        )  # fmt: skip
    try:
        yield one
    finally:
        os.killpg(one.pid, signal.SIGINT)
        try:
            one.wait(30)
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait(30)
        end_group(one.pid)


@pytest.mark.slow
@pytest.mark.dagster
@pytest.mark.timeout(900)
def test_the_processes_of_the_compose_file_do_one_run(installed: Path, tmp_path: Path, compose: Compose) -> None:
    """Each by its own command, with the addresses of this machine in the place of the containers' names."""
    name = f"shop{os.urandom(6).hex()}"
    with psycopg.connect(servers.postgres_url(), autocommit=True) as sql:
        sql.execute(f"CREATE DATABASE {name}")
    database = _database(name)
    port, page = free_port(), free_port()
    home = tmp_path / "home"
    home.mkdir()
    for file in ("dagster.yaml", "workspace.yaml"):
        (home / file).write_text((SHOP / file).read_text())
    environ = built.bare_environ(
        PATH=f"{installed}:{os.environ['PATH']}", DAGSTER_HOME=str(home), SHOP_CODE_HOST="127.0.0.1",
        SHOP_CODE_PORT=str(port), SHOP_DAGSTER_URL=database.replace("postgresql://", "postgresql+psycopg2://", 1),
    )  # fmt: skip
    tables = {**environ, "PERSIST_LOCATION": f"file:{tmp_path / 'data'}", "PERSIST_CONSENSUS": database}
    subprocess.run([str(installed / "python"), "-m", "shop.setup", str(tmp_path / "inbox")], env=tables, check=True)
    lines = [{"id": 1, "customer": "ada", "day": "2026-11-20", "state": "paid", "cents": 500}]
    (tmp_path / "inbox" / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def command(words: list[str], **places: str) -> list[str]:
        """A command of the files, with other places."""
        found = [str(home / "workspace.yaml") if word.endswith("workspace.yaml") else word for word in words]
        return program_of(installed, *(places.get(word, word) for word in found))

    (start,) = [json.loads(rest) for word, rest in instructions() if word == "CMD"]
    here, web = {"0.0.0.0": "127.0.0.1"}, free_port()
    services = compose.services
    with (
        started(command(start, **here, **{"4000": str(port)}), tables, home),
        started(command(services["page"].command, **here, **{"8000": str(page)}), tables, home),
    ):
        check = program_of(installed, "dagster", "api", "grpc-health-check", "--port", str(port))
        wait_until(
            lambda: subprocess.run(check, env=environ, capture_output=True, check=False).returncode == 0, 240, "code"
        )
        with (
            started(command(services["webserver"].command, **here, **{"3000": str(web)}), environ, home) as server,
            started(command(services["daemon"].command), environ, home),
        ):
            dev = DagsterDev(f"http://127.0.0.1:{web}", home, server, "shop")
            wait_until(lambda: is_up(dev), 240, "the web server serves")
            dev.wait_loaded()
            assert not dev.load_error()
            run = dev.launch("__ASSET_JOB", assets=["orders", "revenue"])
            assert dev.wait_finished(run).status == "SUCCESS", dev.why(run)
            with urllib.request.urlopen(f"http://127.0.0.1:{page}/revenue", timeout=60) as answer:
                found = json.load(answer)["revenue"]
    assert found == [{"day": "2026-11-20", "cents": 500, "orders": 1}]
    with psycopg.connect(database) as sql:  # which has Dagster's runs, too
        found = sql.execute("SELECT status FROM runs WHERE run_id = %s", [run]).fetchall()
    assert found == [("SUCCESS",)]


def _database(name: str) -> str:
    """The URL of a database of the shared server."""
    url = servers.postgres_url()
    base, _, options = url.partition("?")
    return f"{base.rpartition('/')[0]}/{name}{'?' if options else ''}{options}"
