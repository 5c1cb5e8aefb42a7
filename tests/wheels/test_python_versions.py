"""The code is written for every Python that the metadata names.

Tests run on one of them, so this is no proof: mypy knows what each release of Python has and has no more, and each
package says which it is for.
"""

from __future__ import annotations

import re

import pytest

from tests import built

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NAMED = [
    found[1]
    for one in built.project("persist-lib")["classifiers"]
    if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", one))
]


def test_both_distributions_name_the_same_versions() -> None:
    library, pipeline = (built.project(name) for name in built.PROJECTS)
    assert library["requires-python"] == pipeline["requires-python"] == f">={NAMED[0]}"
    assert library["classifiers"] == pipeline["classifiers"]
    assert NAMED == ["3.11", "3.12", "3.13"]


def test_the_code_is_type_checked_for_the_newest_too() -> None:
    """By `make lint`. What a release between them took away, the newest lacks as well."""
    assert f"mypy --python-version {NAMED[-1]} persist_lib jobs orchestration" in (built.ROOT / "Makefile").read_text()


@pytest.mark.parametrize("version", NAMED)
def test_every_dependency_has_a_pinned_release_for_that_version(version: str) -> None:
    """By what is installed here, without an index: it says that it is for that version too."""
    needed = built.closure("persist-pipeline[dagster]") | built.closure("persist-lib[polars,s3,postgres,pandas]")
    for name in needed - built.PROJECTS.keys():
        asked = built.python_of(name)
        assert asked is None or asked.contains(f"{version}.0"), (name, str(asked))
