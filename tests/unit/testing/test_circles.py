"""What `make test` leaves to the night, and that its parts look where their tests are."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine

from tests import circles
from tests.circles import Sample, kept
from tests.defects.plant import defects

ROOT = Path(__file__).parents[3]
IDS = [
    f"tests/a/test_b.py::test_{function}[{store}]" for function in "xyz" for store in ("memory", "sqlite", "s3", "pg")
]


@pytest.mark.parametrize("whole", ["memory", "[memory", "[memory]"])
def test_of_a_product_each_function_and_all_that_is_whole_are_kept(whole: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(circles, "SAMPLED", {"tests/a/": Sample(0.0, (whole,))})
    found = kept(IDS, "1")
    assert [one for one in IDS if "memory" in one and one not in found] == []
    assert sorted(one.partition("[")[0] for one in found if "memory" not in one) == [
        f"tests/a/test_b.py::test_{function}" for function in "xyz"
    ]
    assert found == kept(reversed(IDS), "1"), "the order does not matter"
    assert len({frozenset(kept(IDS, str(seed))) for seed in range(20)}) > 1, "another seed is another sample"


def test_what_is_left_to_the_night_or_sampled_is_there():
    for beginning in (*circles.NIGHTLY, *circles.SAMPLED):
        path, _, name = beginning.partition("::")
        assert (ROOT / path).exists(), beginning
        if name := name.partition("[")[0]:
            is_there = rf"^\s*(?:(?:async )?def |class |){name}\w*(?:\(|:| =)"
            assert re.search(is_there, (ROOT / path).read_text(), re.MULTILINE), beginning


def test_of_some_products_one_is_kept_of_all_functions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(circles, "SAMPLED", {"tests/a/": Sample(0.0, is_one=True)})
    assert [len(kept(IDS, str(seed))) for seed in range(3)] == [1, 1, 1]


def test_what_is_of_the_night_and_what_nothing_is_said_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(circles, "NIGHTLY", {"tests/a/test_b.py::test_x": "unit tests"})
    monkeypatch.setattr(circles, "MANY", 5)
    assert {one for one in IDS if one not in kept(IDS, "1")} == {one for one in IDS if "test_x" in one}


def test_of_a_function_of_many_cases_some_are_kept_unless_a_bug_names_it_or_its_cases_are_cheap(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(circles, "SAMPLED", {})
    bug = next(test for one in defects() for test in one.tests if "::" in test and "[" not in test)
    functions = ("tests/a/test_b.py::test_many", bug, f"{circles.WHOLE[0]}test_b.py::test_many")
    many, named, cheap = ([f"{function}[{case}]" for case in range(40)] for function in functions)
    found = kept([*many, *named, *cheap, "tests/a/test_b.py::test_y", *IDS[:3]], "1")
    assert 5 < len(found & {*many}) < 25
    assert {*named, *cheap, "tests/a/test_b.py::test_y", *IDS[:3]} <= found


def test_of_what_is_dear_a_third_is_kept_and_all_that_a_bug_names_or_that_shows_something(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    bug = next(test for one in defects() for test in one.tests if "::" in test and "[" not in test)
    files = (test for one in defects() for test in one.tests if "::" not in test and test.endswith(".py"))
    of_file = next(file for file in files if not file.startswith(circles.SHOWN))
    dear = [f"tests/a/test_b.py::test_{number}" for number in range(40)]
    alone, shown = "tests/a/test_alone.py::test_x", f"{circles.SHOWN[0]}test_b.py::test_x"
    whole = [*(f"{of_file}::test_{number}" for number in range(9)), bug, alone, shown]
    (tmp_path / "dear.txt").write_text("".join(f"1.5 {one}\n" for one in (*dear, *whole)))
    monkeypatch.setattr(circles, "DEAR", tmp_path / "dear.txt")
    circles._dear.cache_clear()
    try:
        found = kept([*dear, *whole, "tests/a/test_b.py::test_cheap"], "1")
    finally:
        circles._dear.cache_clear()
    assert 5 < len(found & {*dear}) < 25
    assert {*whole, "tests/a/test_b.py::test_cheap"} <= found


def test_one_test_strikes_at_some_places_by_day_and_at_all_at_night(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PERSIST_CIRCLE", "day")
    drawn: set[int] = set()
    for seed in range(40):
        monkeypatch.setenv("PERSIST_SEED", str(seed))
        places = circles.by_day(range(1, 10), 3)
        assert len(places) == 3
        drawn.update(places)
    assert drawn == set(range(1, 10))
    monkeypatch.setenv("PERSIST_CIRCLE", "night")
    assert circles.by_day(range(1, 10), 3) == range(1, 10)


@given(st.integers())
@settings(max_examples=10)
def law(_number: int) -> None:
    """A law that is asked for by the test below alone."""


class Model(RuleBasedStateMachine):
    """A model, likewise."""


def test_laws_and_models_draw_less_by_day_and_once_less(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    model = Model.TestCase
    model.settings = settings(max_examples=5, stateful_step_count=20)
    of_law = pytest.Function.from_parent(request.node.parent, name="law", callobj=law)
    of_model = pytest.Function.from_parent(request.node.parent, name="model", callobj=model().runTest)
    monkeypatch.setattr(pytest.Function, "cls", property(lambda item: model if item is of_model else None))

    def counts() -> list[tuple[int, int]]:
        told = law._hypothesis_internal_use_settings, model.settings  # type: ignore[attr-defined]
        return [(one.max_examples, one.stateful_step_count) for one in told]

    before = counts()
    for circle, expected in (("night", before), ("day", [(4, 40), (3, 16)])):
        monkeypatch.setenv("PERSIST_CIRCLE", circle)
        circles.draw_less([of_law, of_model, of_law])
        assert counts() == expected


def test_what_waits_longest_begins_first_and_the_others_keep_their_order():
    names = ["tests/z.py::a", f"{circles.LONGEST[1]}::b", "tests/c.py::c", f"{circles.LONGEST[0]}::d"]
    items = [SimpleNamespace(nodeid=name) for name in names]
    circles.longest_first(items)  # type: ignore[arg-type]
    assert [item.nodeid[-1] for item in items] == ["d", "b", "a", "c"]


def test_what_the_table_names_is_there():
    for beginning in (*circles.NIGHTLY, *circles.SAMPLED, *circles.LONGEST):
        path = beginning.split("::", 1)[0]
        assert (ROOT / path).exists() or list((ROOT / path).parent.glob(f"{Path(path).name}*")), path


def test_no_recorded_bug_is_left_to_the_night():
    named = [test for one in defects() for test in one.tests]
    assert [test for test in named if any(test.startswith(beginning) for beginning in circles.NIGHTLY)] == []


def test_heavy_tests_are_in_the_folders_that_the_makefile_names():
    folders = re.search(r"^HEAVY_FOLDERS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert folders is not None
    named = [ROOT / folder for folder in folders[1].split()]
    marked = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"mark\.(spark|dagster|torture)\b|getattr\(pytest\.mark\b", path.read_text())
    ]
    outside = [path for path in marked if not any(folder in path.parents for folder in named)]
    assert [path.relative_to(ROOT) for path in outside if path != Path(__file__)] == []
