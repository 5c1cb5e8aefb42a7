"""No argument harms a shard: every public callable, each argument in turn, with every wrong kind of value.

What is called is found in `persist_lib.__all__` and in signatures; `public_calls` declares how.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.arguments import shown
from tests.circles import by_day
from tests.unit.client.public_calls import INNER, LEGAL, USES_UP, VALUES, Place, call, callable_of, public


def test_everything_public_has_a_legal_call_and_a_kind_for_each_argument():
    declared = {what.partition(" ")[0] for what in LEGAL if "__" not in what}
    assert set(public()) - INNER == declared
    assert set(public()) >= INNER, "what is gone need not be excepted"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("still"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    """Plain text is a location too: a folder, which is made. Not here."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("what", LEGAL)
def test_a_wrong_argument_is_a_typed_error_and_changes_nothing(what: str, place: Place):
    arguments, kinds = LEGAL[what]
    if what in ("Client.finish", "Client.forget_producer", "Listen.poll", "Listen.close"):
        place.renew()
    function, legal = callable_of(what, place), arguments(place)
    parameters = inspect.signature(function).parameters
    named = {each for each, one in parameters.items() if one.kind is not one.VAR_KEYWORD}
    assert set(legal) == set(kinds) == named
    before = place.everything()
    for argument, is_legal in kinds.items():
        for label, value in VALUES.items():
            if is_legal(value):
                continue
            try:
                call(function, {**legal, argument: value})
            except persist.InvalidUsage as error:
                if len(error.message) > 2000:
                    pytest.fail(f"{what}({argument}={label}) tells {len(error.message)} letters")
            except BaseException as error:  # noqa: BLE001 - named, as that is what this test is about
                pytest.fail(f"{what}({argument}={label}): {type(error).__name__}: {str(error)[:500]}")
            else:
                pytest.fail(f"{what}({argument}={label}) was taken")
        assert place.everything() == before, f"{what}({argument}=…) changed something"


READ = """
import json, sys
import persist_lib as persist

def read(client, shard):
    try:
        return repr(client.open_reader(shard).snapshot().to_pylist())
    except (persist.SinceViolation, persist.ShardFinished) as error:
        return type(error).__name__

found = {}
for url in json.load(sys.stdin):
    with persist.open(url, read_only=True) as client:
        found[url] = {shard: read(client, shard) for shard in client.shards()}
print(json.dumps(found))
"""


SAME = {"np.int64": "5", "np.uint64": "5", "np.float64": "1.5", "np.bool": "True", "np.int64(-1)": "-1"}


def outcome(place: Place, what: str, **changed: Any) -> str:
    """What came of the legal call with something changed: "done", or the name of the error, which must be typed."""
    arguments, _ = LEGAL[what]
    try:
        call(callable_of(what, place), {**arguments(place), **changed})
    except persist.Damage as damage:
        pytest.fail(f"{what}({shown(changed)}): {damage}")
    except persist.PersistError as error:
        return type(error).__name__ if changed else f"{type(error).__name__}: {error.message}"
    except (TypeError, ValueError) as error:
        if changed.keys() <= {"engine", "progress", "change"}:
            return "failed by itself"  # what the caller's own function does is the caller's
        pytest.fail(f"{what}({shown(changed)}): {type(error).__name__}: {error}")
    return "done"


@pytest.mark.slow
def test_legal_arguments_and_what_is_like_them_never_fail_raw_and_harm_no_shard(tmp_path: Path):
    """numpy's numbers are Python's. At the end another process reads all that there is, and the same."""
    place, closed = Place(tmp_path / "used"), Place(tmp_path / "closed")
    for what, (_, kinds) in by_day([*LEGAL.items()], 4):
        place.renew()
        assert outcome(closed if what == "Client.close" else place, what) == "done"
        for argument, is_legal in kinds.items():
            found = {}
            for label, value in VALUES.items():
                if is_legal(value):
                    if what.startswith(USES_UP):
                        place.renew()
                    found[label] = outcome(place, what, **{argument: value})
            for label, same in SAME.items():
                assert found.get(label) == found.get(same), f"{what}({argument}={label}) is not as {same}"
    urls = [place.url, closed.url]
    place.close()
    closed.close()
    namespace: dict[str, Any] = {}
    exec(READ.partition("found = {}")[0], namespace)
    ours = {}
    for url in urls:
        with persist.open(url, read_only=True) as client:
            ours[url] = {shard: namespace["read"](client, shard) for shard in client.shards()}
    theirs = subprocess.run(
        [sys.executable, "-c", READ], input=json.dumps(urls), capture_output=True, text=True, check=False
    )
    assert theirs.returncode == 0, theirs.stderr
    assert json.loads(theirs.stdout) == ours
