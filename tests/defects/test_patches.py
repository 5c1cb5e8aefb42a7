"""Each recorded bug can still be planted, and names tests that are there: `make defects` plants them."""

from __future__ import annotations

import pytest

from tests.defects.plant import ROOT, Defect, applies, defects


@pytest.mark.parametrize("defect", defects(), ids=lambda defect: defect.name)
def test_a_recorded_bug_can_be_planted_and_names_its_tests(defect: Defect):
    assert applies(defect), f"write {defect.file.name} again: the code has changed where it is planted"
    for test in defect.tests:
        file, *names = test.split("[")[0].split("::")
        assert (ROOT / file).exists(), test
        said = (ROOT / file).read_text() if names else ""
        assert all(f"def {name}(" in said or f"class {name}" in said for name in names), test
