"""Names of shards for assets and partitions: valid, readable, injective, and as they were where they were plain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestration.io.names import escaped, place_of, shortened
from persist_lib.errors import InvalidName, InvalidUsage
from persist_lib.ids import NAME

pytestmark = pytest.mark.dagster

# These are durable: a name that changes is an asset that starts again. Never edit a line; add some.
GOLDEN = [
    (["customers"], None, "customers"),
    (["raw", "customers"], None, "raw.customers"),
    (["customers"], "eu", "customers.eu"),
    (["customers"], "2026-11-22", "customers.2026-11-22"),
    (["customers"], "v1.2_beta-3", "customers.v1.2_beta-3"),
    (["customers"], "", "customers."),
    (["customers"], "2026-11-22-04:00", "customers.2026-11-22-04_-3a00"),
    (["customers"], "a|2026-11-22", "customers.a_-7c2026-11-22"),
    (["customers"], "a/b c", "customers.a_-2fb_-20c"),
    (["customers"], "münchen", "customers.m_-c3_-bcnchen"),
    (["customers"], "_-3a", "customers._-5f-3a"),
    (["customers"], ":", "customers._-3a"),
    (["raw", "eu.customers"], None, "raw.eu_-2ecustomers"),
    (["raw.eu", "customers"], None, "raw_-2eeu.customers"),
    (["-x"], None, "_-2dx"),
    (["customers"], "x" * 90, "customers." + "x" * 90),
    (["customers"], "x" * 91, "customers." + "x" * 63 + "_-zbe89558b1003c1b14df0c4f3"),
]


@pytest.mark.parametrize(("asset", "partition", "shard"), GOLDEN)
def test_names_stay_as_they_are_for_ever(asset: list[str], partition: str | None, shard: str) -> None:
    assert place_of(asset, partition, {}).table == shard


anything = st.text(st.characters(codec="utf-8"), max_size=120) | st.text("a_-.:3 ", max_size=12)


@given(anything, anything)
def test_two_partitions_of_an_asset_never_share_a_shard_and_each_has_a_valid_name(one: str, other: str) -> None:
    names = [place_of(["asset"], key, {}).table for key in (one, other)]
    assert all(NAME.fullmatch(name) for name in names)
    assert (names[0] == names[1]) == (one == other)


@given(anything)
def test_a_key_that_looks_like_the_name_of_another_one_has_a_name_of_its_own(key: str) -> None:
    looks_so = escaped(key)
    assert (place_of(["asset"], looks_so, {}).table == place_of(["asset"], key, {}).table) == (looks_so == key)


@given(st.lists(anything.filter(bool), min_size=1, max_size=3), st.lists(anything.filter(bool), min_size=1, max_size=3))
def test_two_unpartitioned_assets_never_share_a_shard(one: list[str], other: list[str]) -> None:
    names = [place_of(key, None, {}).table for key in (one, other)]
    assert all(NAME.fullmatch(name) for name in names)
    assert (names[0] == names[1]) == (one == other)


@given(st.text("abcXYZ019_.-", min_size=1, max_size=60).filter(lambda key: "_-" not in key))
def test_the_partition_keys_that_were_valid_keep_their_names(key: str) -> None:
    place = place_of(["raw", "asset"], key, {})
    assert place.table == f"raw.asset.{key}"
    assert place.former is None


def test_a_name_that_was_valid_and_is_another_now_is_known_as_the_former_one() -> None:
    assert place_of(["a", "b.c"], None, {}).former == "a.b.c"
    assert place_of(["a"], "x_-y", {}).former == "a.x_-y"
    assert place_of(["a"], "x:y", {}).former is None, "this was refused"


def test_the_metadata_names_the_shard_of_an_asset_and_the_start_of_those_of_its_partitions() -> None:
    metadata = {"persist/table": "a.b.c"}
    assert place_of(["a", "b.c"], None, metadata).table == "a.b.c"
    assert place_of(["a", "b.c"], "x y", metadata).table == "a.b.c.x_-20y"
    for whole in ("eu/orders", "x" * 150):
        assert place_of(["a"], None, {"persist/table": whole}).table == whole
    for wrong in ("", "a b", 7, "a//b"):
        with pytest.raises(InvalidUsage, match=r"persist/table of asset a/b\.c"):
            place_of(["a", "b.c"], None, {"persist/table": wrong})


def test_an_asset_key_that_starts_with_nothing_has_no_name() -> None:
    with pytest.raises(InvalidName):
        place_of(["", "a"], None, {})


def test_what_is_not_too_long_never_looks_shortened() -> None:
    looks_so = "a_-z" + "0" * 24
    assert "_-z" not in escaped(looks_so)
    assert shortened("x" * 100) == "x" * 100
    assert len(shortened("x" * 101)) == 100
