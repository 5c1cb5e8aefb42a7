"""The generated order book in a shard: ingested in bounded memory, resumed, and judged by the book itself."""

from __future__ import annotations

from pathlib import Path

import pytest

import persist_lib as persist
from examples import orders
from examples.failures import Differs, OtherSource
from examples.order_book import ORDERS, Book
from examples.orders import Ingested, ingest, verify

ROOT = Path(__file__).resolve().parents[2]


def check(client: persist.Client, book: Book, upper: int, count: int = 10) -> None:
    """The shard ends at `upper` and holds what the book says, at times all over."""
    with client.open_reader("orders") as read:
        assert read.fetch_upper() == persist.at(upper)
        for as_of in sorted({upper - 1, *range(0, upper, max(1, upper // count))}):
            verify(read, book, as_of)


@pytest.mark.parametrize(("per_time", "per_append"), [(2, 1), (64, 64), (100, 10_000), (500, 1_700)])
def test_the_shard_holds_what_the_book_says_at_every_time(
    client: persist.Client, per_time: int, per_append: int
) -> None:
    book = Book(1, per_time)
    updates = 30 * per_time if per_append < per_time else 30_000
    done = ingest(client, book, updates, updates_per_append=per_append)
    assert done.upper == book.end(updates)
    assert updates <= done.updates < updates + per_time
    check(client, book, done.upper)


def test_a_second_run_adds_nothing_and_a_larger_one_only_the_rest(client: persist.Client) -> None:
    book = Book(2)
    ingest(client, book, 5_000)
    assert ingest(client, book, 5_000) == Ingested(50, 50, 0, 0)
    assert ingest(client, book, 3_000) == Ingested(50, 50, 0, 0)
    assert ingest(client, book, 12_000, updates_per_append=700) == Ingested(50, 120, appends=10, updates=7_000)
    check(client, book, 120)


@pytest.mark.parametrize("other", [Book(4), Book(3, 50)])
def test_another_book_is_refused_and_changes_nothing(client: persist.Client, other: Book) -> None:
    ingest(client, Book(3), 5_000)
    with pytest.raises(OtherSource, match="--shard"):
        ingest(client, other, 50_000)
    check(client, Book(3), 50)


def test_a_shard_without_a_record_of_its_book_is_refused(client: persist.Client) -> None:
    client.open_writer("orders", ORDERS).compare_and_append(Book(1).updates(0, 5), 0, 5)
    with pytest.raises(OtherSource, match="no record"):
        ingest(client, Book(1), 5_000)
    assert "orders_book" not in client.shards() or client.inspect("orders_book").state.upper == persist.at(0)


def test_a_kill_after_the_record_and_before_the_first_append_is_no_hindrance(client: persist.Client) -> None:
    def stop(table: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest(client, Book(5), 4_000, updates_per_append=1_000, on_append=stop)
    assert ingest(client, Book(5), 4_000) == Ingested(10, 40, appends=1, updates=3_000)
    check(client, Book(5), 40)


def test_verification_finds_one_wrong_update(client: persist.Client) -> None:
    book = Book(6)
    ingest(client, book, 2_000)
    wrong = book.updates(20, 21).slice(0, 99)
    client.open_writer("orders", ORDERS).compare_and_append(wrong, 20, 21)
    with client.open_reader("orders") as read:
        verify(read, book, 19)
        with pytest.raises(Differs):
            verify(read, book, 20)


def test_the_command_says_what_it_did(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--location", f"file:{tmp_path}", "--updates", "20_000", "--verify"]
    assert orders.main([*arguments, "--seed", "9"]) == 0
    assert "200 times, 20000 updates, 2 appends" in capfd.readouterr().out
    assert orders.main([*arguments, "--seed", "10"]) == 3
    errors = capfd.readouterr().err
    assert "seed" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "wrong", [["--updates", "0"], ["--updates", "many"], ["--updates-per-time", "3"], ["--seed", "-1"]]
)
def test_wrong_arguments_exit_with_2(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        orders.main(wrong)
    assert ended.value.code == 2
