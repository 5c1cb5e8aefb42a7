"""A seeded order book of any size in a shard: orders placed, changed, shipped, cancelled, and corrected late.

    python -m examples.orders --updates 1_000_000 --location file:./data --shard orders --seed 7

Every time holds `--updates-per-time` updates. The shard is appended at its own upper, so a killed run goes on where it
stopped, and a later run with more updates adds only those. A small second shard, `<shard>_book`, records the book's
seed and updates per time; going on with other ones is refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

import persist_lib as persist
from examples import console
from examples.failures import Differs, Failed, OtherSource
from examples.order_book import ORDERS, Book, generate

BOOK = persist.Schema(key={"name": "string not null"}, value={"number": "int64"})
UPDATES_PER_APPEND = 10_000


@dataclass(frozen=True, slots=True)
class Ingested:
    """What one run did: it ingested the times `[lower, upper)`, by so many appends with so many updates in all."""

    lower: int
    upper: int
    appends: int
    updates: int


def ingest(
    client: persist.Client,
    book: Book,
    updates: int,
    shard: str = "orders",
    *,
    updates_per_append: int = UPDATES_PER_APPEND,
    on_append: Callable[[pa.Table], None] = lambda _: None,
) -> Ingested:
    """Append those of the book's first `updates` updates that the shard does not hold yet. Safe to kill and run again.

    Raises OtherSource if the shard was filled from another book, or by something else; nothing is appended then.
    """
    write, read = client.open_shard(shard, ORDERS)
    with write, read:
        lower = time = _upper(write)
        _record(client, book, f"{shard}_book", lower)
        count = total = 0
        for low, time, table in generate(book, updates, lower=lower, updates_per_append=updates_per_append):
            write.compare_and_append(table, expected_upper=low, new_upper=time)
            count, total = count + 1, total + len(table)
            on_append(table)
        return Ingested(lower, time, count, total)


def verify(read: persist.ReadHandle, book: Book, as_of: int) -> int:
    """Compare the snapshot at a time with the book's contents. Return the number of orders, or raise Differs."""
    actual, expected = read.snapshot(as_of=as_of).to_arrow().sort_by("order_id"), book.contents(as_of)
    for name in ORDERS.names:
        if not actual[name].equals(expected[name]):
            raise Differs(f"at time {as_of} the shard's orders differ from the book's in {name}")
    return len(expected)


def _upper(write: persist.WriteHandle) -> int:
    time = write.fetch_upper().time
    if time is None:
        raise Failed("the shard is finished: nothing can be appended to it any more")
    return time


def _record(client: persist.Client, book: Book, name: str, held: int) -> None:
    """Record which book the shard is filled from, before anything else; refuse if it is another one."""
    numbers = {"seed": book.seed, "updates_per_time": book.updates_per_time}
    write, read = client.open_shard(name, BOOK)
    with write, read:
        if _upper(write) == 0:
            if held:
                raise OtherSource(f"the shard holds {held} times, but {name} has no record of their source")
            rows = [{"name": key, "number": number, "_time": 0, "_diff": 1} for key, number in numbers.items()]
            write.compare_and_append(rows, expected_upper=0, new_upper=1)
        recorded = {row["name"]: row["number"] for row in read.snapshot(as_of=0).to_arrow().to_pylist()}
    if recorded != numbers:
        raise OtherSource(f"the shard is filled from the book {recorded}, not {numbers}; choose another --shard")


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code (see `console`)."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        book = Book(options.seed, options.updates_per_time)
    except ValueError as error:
        parser.error(str(error))
    return console.run(lambda: _program(options, book))


def _program(options: argparse.Namespace, book: Book) -> None:
    with persist.open(options.location) as client:
        with console.progress("updates", options.updates) as advance:
            done = ingest(
                client, book, options.updates, options.shard, updates_per_append=options.updates_per_append,
                on_append=lambda table: advance(len(table)),
            )  # fmt: skip
        print(f"{options.shard}: {done.upper - done.lower} times, {done.updates} updates, {done.appends} appends")
        if options.verify and done.upper:
            with client.open_reader(options.shard, ORDERS) as read:
                orders = verify(read, book, done.upper - 1)
            print(f"{options.shard}: the {orders} orders at time {done.upper - 1} are the book's")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.orders", description=(__doc__ or "").split("\n")[0])
    positive = console.positive
    parser.add_argument("--updates", type=positive, default=1_000_000, help="in all (default: a million)")
    parser.add_argument("--location", default="file:./data", help="where the shard is (default: file:./data)")
    parser.add_argument("--shard", default="orders", help="its name (default: orders)")
    parser.add_argument("--seed", type=int, default=7, help="which book (default: 7)")
    parser.add_argument("--updates-per-time", type=positive, default=100, metavar="N", help="even (default: 100)")
    parser.add_argument("--updates-per-append", type=positive, default=UPDATES_PER_APPEND, metavar="N",
                        help=f"whole times, at least one (default: {UPDATES_PER_APPEND})")  # fmt: skip
    parser.add_argument("--verify", action="store_true", help="then compare the last snapshot with the book")
    return parser


if __name__ == "__main__":
    sys.exit(main())
