"""Loading much by tasks: the same collections as an instance makes, in one commit for each window, through deaths."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from persist_lib.catalog import committing, writing
from persist_lib.errors import Gone, InvalidUsage, Refused, UpperMismatch
from persist_lib.frontier import at
from persist_lib.kernel.columns import unpacked
from persist_lib.relation.staging import append_prepared
from persist_lib.relation.writer import WriteHandle
from persist_lib.schema.schema import Schema
from persist_lib.sources import (
    Collection,
    Decoding,
    Files,
    Kafka,
    Meaning,
    Postgres,
    Transactions,
)
from persist_lib.sources.bindings import Window
from persist_lib.sources.files.reader import LineFiles
from persist_lib.sources.loading import Answer, Loading, Loads, Piece, Work, begin, check_loadable, settle
from persist_lib.sources.records import SourceRecord
from tests.loading import Place

WAITING = Meaning(envelope="debezium", transactions=Transactions(topic="t"))


class Here:
    """Carries tasks out in this process, each from the bytes that it would be sent; in any order."""

    def __init__(self, seed: int = 1, meets: Callable[[int], None] = lambda _: None) -> None:
        self._random, self._meets = np.random.default_rng(seed), meets
        self.works: list[Work] = []

    def __call__(self, work: Work, says: str) -> Sequence[Answer]:
        assert "loading" in says
        self.works.append(work)
        encoded = pickle.dumps(work)
        answers: list[Answer] = []
        sent: list[Piece] = []
        for index in self._random.permutation(work.tasks).tolist():
            self._meets(index)
            for one in begin(pickle.loads(encoded), index):
                (answers if isinstance(one, Answer) else sent).append(pickle.loads(pickle.dumps(one)))
        sent.sort()
        for bucket in sorted({one.bucket for one in sent}):
            mine = iter([one for one in sent if one.bucket == bucket])
            answers += [settle(pickle.loads(encoded), bucket, mine)]
        return answers


def loading_of(place: Place, engine: Here) -> Loading:
    """An instance that loads in very small pieces."""
    found = place.sources.open("s", loads=Loads(engine, task_bytes=2_000))
    assert isinstance(found, Loading)
    found.step_bytes = 1_000
    return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path)
    yield found
    found.sources.close()
    found.client.close()


@pytest.mark.parametrize("meaning", [Meaning(keep_raw=True), Meaning(envelope="upsert", keep_raw=True)])
@pytest.mark.parametrize("shards", [1, 3])
def test_tasks_make_what_an_instance_makes_in_one_commit_a_window(place: Place, meaning: Meaning, shards: int) -> None:
    place.create(meaning=meaning, shards=shards)
    rng, engine = np.random.default_rng(5), Here()
    place.write_many(rng, 4, 200, 30)
    with closing(loading_of(place, engine)) as loading:
        first = loading.step()
        assert first.messages == 800
        assert first.errors == len(place.updates("s/errors")) > 0
        place.write_many(rng, 5, 200, 40)
        second = loading.step()
    assert second.messages == 1000
    assert [len(work.windows) > 3 for work in engine.works] == [True, True]
    assert bool(engine.works[1].splits) == (meaning.envelope == "upsert")
    shard = place.sources.controller.describe("s").active.shards[0]
    place.check_same()
    assert len([batch for batch in place.client.machine(shard).state.trace if batch.count]) <= 2
    place.sources.run("s", until_idle=True)
    place.check_same()


def test_when_a_process_dies_while_tasks_run_or_between_two_shards_the_next_one_finishes(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.create(shards=2)
    place.write_many(np.random.default_rng(1), 3, 200, 30)

    def dies(index: int) -> None:
        if index == 2:
            raise KeyboardInterrupt

    with closing(loading_of(place, Here(meets=dies))) as loading, pytest.raises(KeyboardInterrupt):
        loading.step()
    assert place.sources.show("s").time == 0
    append = append_prepared
    sent: list[str] = []

    def cut_short(self: WriteHandle, *args: Any) -> object:
        if len(sent) == 2:
            raise KeyboardInterrupt
        sent.append(self.shard)
        return append(self, *args)

    monkeypatch.setattr(writing, "_has_transactions", lambda _: False)  # as on S3 alone: a shard after the other
    monkeypatch.setattr(committing, "append_prepared", cut_short)
    with closing(loading_of(place, Here())) as loading, pytest.raises(KeyboardInterrupt):
        loading.step()
    monkeypatch.setattr(committing, "append_prepared", append)
    assert len(sent) == 2
    assert place.sources.show("s").time == 0, "of what was written in part, nothing is complete"
    engine = Here()
    with closing(loading_of(place, engine)) as loading:
        assert loading.step().messages == 600
    assert engine.works == [], "what another process has begun to write is compared, and written by one process"
    place.check_same()


@pytest.mark.parametrize("task", [0, 3, 10_000])
def test_an_instance_that_is_first_wins_and_all_is_there_once(place: Place, task: int) -> None:
    place.create(shards=2)
    place.write_many(np.random.default_rng(2), 4, 100, 20)
    other = place.sources.open("s")
    other.window_bytes = 2_000

    def overtakes(index: int) -> None:
        if index == min(task, 5):
            other.step(mints=False)

    with closing(other), closing(loading_of(place, Here(meets=overtakes))) as loading:
        with pytest.raises(UpperMismatch):
            loading.step()
        assert loading.step().messages == 0
    place.check_same()
    with place.sources.controller.open_reader("s/raw") as reader, reader.snapshot() as raw:
        assert raw.to_arrow().num_rows == 400


def test_a_window_on_both_sides_of_a_handover_is_written_by_one_process(place: Place) -> None:
    place.create(meaning=Meaning(envelope="upsert"))
    place.write_many(np.random.default_rng(3), 2, 100, 20)
    controller = place.sources.controller
    with closing(loading_of(place, Here())) as loading:
        loading.step()
        number = controller.make_rendition("s", shards=2, copy=True).number
        controller.copy_rendition("s", number)
        start = controller.hand_over("s", number)
        place.write_many(np.random.default_rng(4), 2, 100, 20)
        copying = threading.Thread(target=controller.copy_rendition, args=("s", number), kwargs={"to_end": True})
        copying.start()
        assert loading.step().messages == 200
        copying.join()
        assert place.sources.show("s").time > start
        place.write_many(np.random.default_rng(5), 2, 100, 20)
    engine = Here()
    with closing(loading_of(place, engine)) as loading:
        assert loading.step().messages == 200
    [work] = engine.works
    assert work.tickets["output"].rendition.number == number
    assert place.updates("s")
    words = {row["id"]: row["word"] for row in place.rows()}
    assert words == place.folded()


def test_a_hot_key_is_sent_once_for_each_time(place: Place) -> None:
    place.create(meaning=Meaning(envelope="upsert"))
    place.write("a.jsonl", *({"id": 7, "word": f"w{number}"} for number in range(2_000)))
    sent: list[int] = []

    class Counting(Here):
        def __call__(self, work: Work, says: str) -> Sequence[Answer]:
            for index in range(work.tasks):
                sent.extend(unpacked(one.data).num_rows for one in begin(work, index) if isinstance(one, Piece))
            return super().__call__(work, says)

    with closing(loading_of(place, Counting())) as loading:
        assert loading.step().messages == 2_000
    steps = len(place.updates("s"))
    assert sum(sent) < 200
    assert steps > 10
    place.check_same()


def test_too_many_bad_messages_stop_it_before_anything_is_written(place: Place) -> None:
    place.create(meaning=Meaning(envelope="upsert", most_errors=3))
    place.write("a.jsonl", *([{"id": 1, "word": "a"}] * 100), *([b"oh no"] * 4))
    with closing(loading_of(place, Here())) as loading, pytest.raises(Refused, match="4 messages are bad"):
        loading.step()
    assert place.sources.show("s").time == 0
    assert place.sources.controller.describe("s/errors").upper == at(0)


def test_a_file_that_tasks_do_not_see_is_gone_and_it_says_who_has_to_see_it(place: Place) -> None:
    place.create()
    place.write_many(np.random.default_rng(1), 2, 100, 20)

    def hides(_: int) -> None:
        (place.folder / "0.jsonl").unlink(missing_ok=True)

    with closing(loading_of(place, Here(meets=hides))) as loading, pytest.raises(Gone, match="see the same files"):
        loading.step()


@pytest.mark.parametrize(
    ("reader", "meaning", "why"),
    [
        (Kafka(brokers="127.0.0.1:1", topic="t"), Meaning(), "kafka is read in order"),
        (Collection(name="other"), Meaning(), "collection is read in order"),
        (Postgres(url="postgresql://127.0.0.1/db", table="public.t"), Meaning(envelope="changes"), "is one copy"),
        (
            Files(place="in", format="jsonl"),
            Meaning(envelope="debezium", transactions=Transactions(topic="t")),
            "wait for one",
        ),
    ],
)
def test_what_cannot_be_loaded_by_tasks_is_refused(reader: Any, meaning: Meaning, why: str) -> None:
    schema = Schema(key={"id": "int64"})
    record = SourceRecord(id="1", name="s", reader=reader, decoding=Decoding(), meaning=meaning, schema=schema)
    with pytest.raises(InvalidUsage, match=f"{why}.*persist ingest"):
        check_loadable(record)


def test_what_is_not_worth_it_is_decoded_here_in_bounded_memory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LineFiles, "estimate", lambda *_: 1)  # so that a window seems to be one task
    place.create()
    place.write_many(np.random.default_rng(1), 1, 1_000, 20)
    engine = Here()
    with closing(loading_of(place, engine)) as loading:
        sizes = [some.nbytes for some in recorded(loading, monkeypatch)]
    assert engine.works == []
    assert len(sizes) > 5
    assert max(sizes) < 8_000
    place.check_same()


def recorded(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> list[pa.Table]:
    """The messages that an instance had in memory at once, in its next step."""
    parts, found = Loading._parts, list[pa.Table]()

    def noted(self: Loading, window: Window) -> Iterator[tuple[Window, pa.Table]]:
        for part, some in parts(self, window):
            found.append(some)
            yield part, some

    monkeypatch.setattr(Loading, "_parts", noted)
    loading.step()
    return found
