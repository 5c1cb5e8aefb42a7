"""What all tests share: how hypothesis runs, the seed of random histories, and the wheels of this tree.

Without PERSIST_SEED they are the same in each run. PERSIST_SEED=fresh, as `make test` has it, draws a seed and says it
at the top of the report; with that number in its place the same histories come again. PERSIST_SEED=fixed is as without.
"""

from __future__ import annotations

import atexit
import gc
import os
import random
import secrets
import signal
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests import built, circles, counted, durations, jvms

if TYPE_CHECKING:
    from persist_lib import Client
    from tests.worlds import World

VARIABLE = "PERSIST_SEED"


def _settings(name: str, *, derandomize: bool) -> None:
    """No deadline: the machine may be busy. No example database: what fails is planted as a test of its own."""
    settings.register_profile(
        name,
        deadline=None,
        database=None,
        derandomize=derandomize,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


_settings("fixed", derandomize=True)
_settings("fresh", derandomize=False)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose how random histories are drawn; workers of pytest-xdist inherit the number."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # some shells have it ignored
    jvms.be_light()
    seed = os.environ.get(VARIABLE)
    if seed == "fresh":
        seed = os.environ[VARIABLE] = str(secrets.randbits(32))
    if seed == "fixed":
        seed = os.environ.pop(VARIABLE) and None
    if seed is not None:
        config.option.hypothesis_seed = seed
    settings.load_profile("fixed" if config.option.hypothesis_seed is None else "fresh")
    if os.environ.get(counted.VARIABLE):
        config.pluginmanager.register(counted.Recorder(), "counted")
    folder = os.environ.get(durations.VARIABLE)
    if folder:
        config.pluginmanager.register(durations.Recorder(Path(folder)), "durations")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No collections of garbage while tests are collected, as all of these stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to the night what is not of this circle."""
    circles.choose(config, items)
    circles.draw_less(items)
    circles.longest_first(items)


def pytest_collection_finish() -> None:
    """What was collected stays to the end: the garbage collector need not go through it with each test again.

    Nor five times where pytest looks for what was never closed. After that extensions count what of theirs is left.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


def pytest_report_header() -> str:
    """How to have the same histories again."""
    seed = os.environ.get(VARIABLE)
    return f"random histories: {'fixed' if seed is None else f'repeat them with {VARIABLE}={seed}'}"


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def wheels(shared_folder: Path) -> built.Wheels:
    """The wheels of both distributions of this tree, built once for all workers."""
    return built.built_in(shared_folder / "wheels")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """The randomness of this test, by PERSIST_SEED: the same again, as far as the timing of processes allows it."""
    return random.Random(f"{os.environ.get(VARIABLE, 'fixed')} {request.node.nodeid}")


@pytest.fixture
def world() -> Iterator[World]:
    """A location in memory, whose clients and clock a test decides."""
    from tests.worlds import World  # noqa: PLC0415 - not each test needs the library

    made = World()
    yield made
    made.close()


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of a location in memory."""
    import persist_lib as persist  # noqa: PLC0415

    with persist.open("memory:") as opened:
        yield opened
