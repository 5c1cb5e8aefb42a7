"""Each recorded bug can still be planted, and names tests that are there: `make defects` plants them."""

from __future__ import annotations

import pytest

from tests.defects.plant import ROOT, Defect, applies, defects


@pytest.mark.parametrize("defect", defects(), ids=lambda defect: defect.name)
def test_a_recorded_bug_can_be_planted_and_names_its_tests(defect: Defect):
    assert applies(defect), f"write {defect.file.name} again: the code has changed where it is planted"
    for test in defect.tests:
        assert (ROOT / test.split("::", 1)[0]).exists(), test
