"""A row of the database whose types are wrong is damage, whichever of them is."""

from __future__ import annotations

from pathlib import Path

import pytest

from persist_lib.errors import Corrupt
from persist_lib.ids import SeqNo
from persist_lib.location.api import Row
from persist_lib.location.sqlite.file import row_of


@pytest.mark.parametrize("found", [("1", b"row"), (1, "row"), (1.0, b"row"), (None, None), (True, b"row")])
def test_a_row_of_other_types_is_damage(found):
    with pytest.raises(Corrupt, match="is damaged"):
        row_of(found, "orders", Path("log.sqlite"))


def test_a_row_of_a_number_and_bytes_is_a_row():
    assert row_of((1, b"row"), "orders", Path("log.sqlite")) == Row(SeqNo(1), b"row")
