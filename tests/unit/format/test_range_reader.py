"""What a reader of chunks keeps in memory, and that its bytes are those of the object, whatever it lets go of."""

from __future__ import annotations

import random

import pytest

from persist_lib.format.digest import CHUNK, digest
from persist_lib.format.range_reader import PIECE, ChunkedReader

SIZE = 2 * CHUNK + 12_345


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(1).randbytes(SIZE)


class Store:
    """An object, and how often its bytes were asked for."""

    def __init__(self, data: bytes) -> None:
        self.data, self.asked = data, list[tuple[int, int]]()

    def reader(self, *, forward: bool) -> ChunkedReader:
        return ChunkedReader("k", len(self.data), digest(self.data), self.fetch, forward=forward)

    def fetch(self, start: int, end: int) -> bytes:
        self.asked.append((start, end))
        return self.data[start:end]


def held(reader: ChunkedReader) -> int:
    return sum(chunk.held for chunk in reader._chunks.values())


def test_a_reader_that_goes_forward_lets_go_of_what_is_behind_it_and_fetches_each_chunk_once(data: bytes) -> None:
    store = Store(data)
    reader, found, step = store.reader(forward=True), [], 300_000
    while piece := reader.read(step):
        found.append(bytes(piece))
        began = reader.tell() - len(piece)
        if began // CHUNK == (reader.tell() - 1) // CHUNK:
            assert held(reader) <= CHUNK - began % CHUNK + PIECE
    assert b"".join(found) == data
    assert store.asked == [(0, CHUNK), (CHUNK, 2 * CHUNK), (2 * CHUNK, SIZE)]


def test_what_was_let_go_of_can_be_read_again(data: bytes) -> None:
    reader, rng = Store(data).reader(forward=True), random.Random(2)
    for _ in range(300):
        if rng.random() < 0.5:
            reader.seek(rng.randrange(SIZE))
        at, count = reader.tell(), rng.randrange(2 * PIECE)
        assert reader.read(count) == data[at : at + count]


def test_a_view_outlives_what_the_reader_lets_go_of(data: bytes) -> None:
    reader = Store(data).reader(forward=True)
    views = [reader.read(100_000) for _ in range(60)]
    assert held(reader) < CHUNK - 4 * PIECE
    assert b"".join(views) == data[: 60 * 100_000]


def test_the_footer_is_read_without_a_second_request_for_its_chunk(data: bytes) -> None:
    store = Store(data[: CHUNK + 3 * PIECE])
    reader = store.reader(forward=True)
    for start, count in ((CHUNK + 2 * PIECE, PIECE), (CHUNK + PIECE, 1000), (CHUNK + 2 * PIECE, 1000)):
        reader.seek(start)
        assert reader.read(count) == data[start : start + count]
    assert len(store.asked) == 1


def test_other_readers_keep_whole_chunks(data: bytes) -> None:
    store = Store(data)
    reader = store.reader(forward=False)
    for start in (0, 1000, 5 * PIECE, 0):
        reader.seek(start)
        assert reader.read(1000) == data[start : start + 1000]
        assert reader.read(1000) == data[start + 1000 : start + 2000]
    assert held(reader) == CHUNK
    assert len(store.asked) == 1
