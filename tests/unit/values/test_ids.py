"""Names and ids: what can be one, and that none can be taken for another or escape from its folder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist_lib.errors import InvalidName, InvalidUsage
from persist_lib.format.paths import blob_key, part_key, prefix, rollup_key
from persist_lib.ids import (
    READER,
    WRITER,
    PartKey,
    SeqNo,
    ShardId,
    format_reader_id,
    format_writer_id,
    parse_hold_name,
    parse_rollup_key,
    parse_shard_id,
    uploader_of,
)
from persist_lib.location.contract import check_key

ENTROPY = st.integers(0, 2**64 - 1)
BAD = ["", ".", "..", ".a", "-a", "a/b", "a\\b", "a b", "a\n", "ä", "a" * 101, "a\x00", None, 5, b"a", "a:b", "a%2e"]


@pytest.mark.parametrize("parse", [parse_shard_id, parse_hold_name])
@pytest.mark.parametrize("name", ["a", "A9_.-", "0", "_x", "a" * 100, "orders.2024-01"])
def test_a_name_is_letters_digits_and_a_few_signs(parse, name):
    assert parse(name) == name


@pytest.mark.parametrize("parse", [parse_shard_id, parse_hold_name])
@pytest.mark.parametrize("name", BAD)
def test_a_name_that_cannot_be_a_path_is_refused_with_the_name(parse, name):
    with pytest.raises(InvalidName) as caught:
        parse(name)
    assert caught.value.fields["name"] == name
    assert repr(name) in str(caught.value)
    assert isinstance(caught.value, InvalidUsage)


@given(entropy=ENTROPY)
def test_ids_of_writers_and_readers_are_never_mixed(entropy):
    writer, reader = format_writer_id(entropy), format_reader_id(entropy)
    assert WRITER.fullmatch(writer)
    assert not READER.fullmatch(writer)
    assert READER.fullmatch(reader)
    assert not WRITER.fullmatch(reader)
    assert int(writer[1:], 16) == entropy


@given(uploader=ENTROPY, entropy=ENTROPY, seqno=st.integers(0, 10**20 - 1))
def test_a_key_tells_its_uploader_or_its_seqno_and_can_be_stored_anywhere(uploader, entropy, seqno):
    writer = format_writer_id(uploader)
    part, rollup = part_key(writer, entropy), rollup_key(SeqNo(seqno), entropy)
    assert (uploader_of(part), parse_rollup_key(part)) == (writer, None)
    assert (uploader_of(rollup), parse_rollup_key(rollup)) == ("rollup", seqno)
    for key in (part, rollup):
        full = blob_key(ShardId("orders"), key)
        assert check_key(full) == full
        assert full.startswith(prefix(ShardId("orders")))


@given(a=st.integers(0, 10**19), b=st.integers(0, 10**19))
def test_rollups_are_listed_in_the_order_of_their_seqnos(a, b):
    assert (rollup_key(SeqNo(a), 0) < rollup_key(SeqNo(b), 0)) == (a < b)


@pytest.mark.parametrize(
    "key",
    ["rollup/v1-ff", "rollup/v00000000000000000001", "x/rollup/v00000000000000000001-00000000000000ff", "",
     "rollup/v00000000000000000001-00000000000000FF", "rollup/v00000000000000000001-00000000000000ff/x"],
)  # fmt: skip
def test_what_looks_like_a_rollup_is_none(key):
    assert parse_rollup_key(PartKey(key)) is None


def test_a_shard_whose_name_starts_like_another_s_does_not_share_its_prefix():
    assert not blob_key(ShardId("orders2"), PartKey("w/1")).startswith(prefix(ShardId("orders")))
