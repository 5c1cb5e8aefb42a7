"""Orders and lineitems like TPC-H's, made by arithmetic: the same rows for the same keys, on any machine.

A row is a function of its key and of nothing else, so any piece of a table can be made by itself, in any order, by
Spark's tasks too. Distributions follow TPC-H's tables (1.5 M orders and about 6 M lineitems at scale 1; sparse order
keys; 1 to 7 lineitems an order; its value ranges), but not its texts, and not its random numbers: results are not TPC
results.

A refresh function pair, as TPC-H has it: RF1 inserts new orders, RF2 deletes old ones, each a thousandth of the orders.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.schema.schema import Schema

ORDERS_AT_1 = 1_500_000
"""Orders at scale 1."""
LINES = 7
"""The most lineitems of an order."""
PRIORITIES = ("1-URGENT", "2-HIGH", "3-MEDIUM", "4-NOT SPECIFIED", "5-LOW")
MODES = ("AIR", "FOB", "MAIL", "RAIL", "REG AIR", "SHIP", "TRUCK")
INSTRUCTIONS = ("COLLECT COD", "DELIVER IN PERSON", "NONE", "TAKE BACK RETURN")
WORDS = ("accounts", "deposits", "requests", "packages", "theodolites", "foxes", "ideas", "pinto beans", "instructions")
FIRST_DAY = (dt.date(1992, 1, 1) - dt.date(1970, 1, 1)).days
DAYS = 2406
"""Orders are placed within so many days; TPC-H's are from 1992-01-01 to 1998-08-02."""
TODAY = FIRST_DAY + 1263
"""1995-06-17: what was shipped later is open."""
MONEY = pa.decimal128(15, 2)

ORDERS = Schema(
    {"o_orderkey": "int64 not null"},
    {
        "o_custkey": "int64 not null", "o_orderstatus": "string not null", "o_totalprice": "decimal128(15, 2) not null",
        "o_orderdate": "date32 not null", "o_orderpriority": "string not null", "o_clerk": "string not null",
        "o_shippriority": "int32 not null", "o_comment": "string not null",
    },
)  # fmt: skip
LINEITEM = Schema(
    {"l_orderkey": "int64 not null", "l_linenumber": "int32 not null"},
    {
        "l_partkey": "int64 not null", "l_suppkey": "int64 not null", "l_quantity": "decimal128(15, 2) not null",
        "l_extendedprice": "decimal128(15, 2) not null", "l_discount": "decimal128(15, 2) not null",
        "l_tax": "decimal128(15, 2) not null", "l_returnflag": "string not null", "l_linestatus": "string not null",
        "l_shipdate": "date32 not null", "l_commitdate": "date32 not null", "l_receiptdate": "date32 not null",
        "l_shipinstruct": "string not null", "l_shipmode": "string not null", "l_comment": "string not null",
    },
)  # fmt: skip

Numbers = npt.NDArray[np.int64]


class Refresh(NamedTuple):
    """What one pair of refresh functions does: the numbers of the orders that are new, and of those that go."""

    new: Numbers
    gone: Numbers


def initial(scale: float) -> Numbers:
    """The numbers of the orders that there are at first."""
    return np.arange(round(ORDERS_AT_1 * scale))


def refresh(scale: float, turn: int) -> Refresh:
    """The refresh of a turn (1, 2, …): a thousandth of the orders is added, and as many of the oldest left go."""
    orders = round(ORDERS_AT_1 * scale)
    each = max(1, orders // 1000)
    if turn * each > orders:
        raise ValueError(f"there are {orders} orders, not {turn * each} to delete")
    return Refresh(
        orders + (turn - 1) * each + np.arange(each),
        # Every number that is a multiple of the stride plus the turn: spread over all, and none of them twice.
        (np.arange(each) * (orders // each) + (turn - 1)) % orders,
    )


def orders(numbers: Numbers) -> pa.Table:
    """The rows of these orders, in the order of `numbers`."""
    items, keys = _items_of(numbers), order_keys(numbers)
    prices, shipped = np.zeros(len(numbers), np.int64), np.zeros(len(numbers), np.int64)
    np.add.at(prices, items.owner, items.price)
    np.add.at(shipped, items.owner, items.shipped <= TODAY)
    lines = np.bincount(items.owner, minlength=len(numbers))
    status = np.where(shipped == lines, 0, np.where(shipped == 0, 1, 2))
    clerks = pc.utf8_lpad(pa.array(_draw(keys, 3, 1000) + 1).cast(pa.string()), 9, "0")
    return pa.table(
        [
            keys, _draw(keys, 1, 99_999) + 1, _one_of("FOP", status), _money(prices), _days(_order_days(keys)),
            _one_of(PRIORITIES, _draw(keys, 2, len(PRIORITIES))),
            pc.binary_join_element_wise("Clerk", clerks, "#"), np.zeros(len(keys), np.int32), _comments(keys, 4),
        ],
        schema=pa.schema(list(ORDERS.data)),
    )  # fmt: skip


def lineitems(numbers: Numbers) -> pa.Table:
    """The rows of these orders' lineitems: each order's together, in the order of `numbers`."""
    items = _items_of(numbers)
    seed, shipped = items.seed, items.shipped
    received = shipped + 1 + _draw(seed, 8, 30)
    returned = np.where(received <= TODAY, _draw(seed, 9, 2), 2)
    return pa.table(
        [
            items.keys, items.line.astype(np.int32), items.parts, _draw(seed, 10, 10_000) + 1,
            _money(items.quantity * 100), _money(items.price), _money(_draw(seed, 11, 11)), _money(_draw(seed, 12, 9)),
            _one_of("RAN", returned), _one_of("FO", (shipped > TODAY).astype(np.int64)), _days(shipped),
            _days(_order_days(items.keys) + 30 + _draw(seed, 13, 61)), _days(received),
            _one_of(INSTRUCTIONS, _draw(seed, 14, len(INSTRUCTIONS))), _one_of(MODES, _draw(seed, 15, len(MODES))),
            _comments(seed, 16),
        ],
        schema=pa.schema(list(LINEITEM.data)),
    )  # fmt: skip


class _Items(NamedTuple):
    """Lineitems as numbers: whose they are (a place in what was asked for), keys, prices in cents, days."""

    owner: Numbers
    keys: Numbers
    line: Numbers
    seed: Numbers
    parts: Numbers
    quantity: Numbers
    price: Numbers
    shipped: Numbers


def _items_of(numbers: Numbers) -> _Items:
    lines = _draw(order_keys(numbers), 17, LINES) + 1
    owner = np.repeat(np.arange(len(numbers)), lines)
    keys = order_keys(numbers)[owner]
    line = np.arange(len(keys)) - np.repeat(np.cumsum(lines) - lines, lines) + 1
    seed = keys * (LINES + 1) + line
    parts, quantity = _draw(seed, 5, 200_000) + 1, _draw(seed, 6, 50) + 1
    price = quantity * (90_000 + (parts // 10) % 20_001 + 100 * (parts % 1000))
    shipped = _order_days(keys) + 1 + _draw(seed, 7, 121)
    return _Items(owner, keys, line, seed, parts, quantity, price, shipped)


def order_keys(numbers: Numbers) -> Numbers:
    """The key of the n-th order: of each 32 keys the first 8 are used, as in TPC-H."""
    return (numbers // 8) * 32 + numbers % 8 + 1


def _order_days(keys: Numbers) -> Numbers:
    return FIRST_DAY + _draw(keys, 18, DAYS)


def _draw(keys: Numbers, stream: int, below: int) -> Numbers:
    """A number in `[0, below)` for each key, by splitmix64."""
    with np.errstate(over="ignore"):
        x = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(stream * 0xD1B54A32D192ED03 % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x % np.uint64(below)).astype(np.int64)


def _one_of(texts: Sequence[str], which: Numbers) -> pa.Array:
    return pa.array(list(texts)).take(pa.array(which))


def _comments(seed: Numbers, stream: int) -> pa.Array:
    """Texts of a few words, most of them different."""
    words = [_one_of(WORDS, _draw(seed, stream + 100 * place, len(WORDS))) for place in (1, 2, 3)]
    number = pa.array(_draw(seed, stream, 1_000_000)).cast(pa.string())
    return pc.binary_join_element_wise(*words, number, " ")


def _money(cents: Numbers) -> pa.Array:
    """Exact decimals of two places: their 128 bits are those of the cents."""
    words = np.empty((len(cents), 2), np.int64)
    words[:, 0], words[:, 1] = cents, cents >> 63
    return pa.Array.from_buffers(MONEY, len(cents), [None, pa.py_buffer(words.tobytes())])


def _days(days: Numbers) -> pa.Array:
    return pa.array(days.astype(np.int32)).cast(pa.date32())
