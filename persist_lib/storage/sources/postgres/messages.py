"""Transactions and snapshots as messages: tables of bounded size, each message with the header that it needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from persist_lib.config import MIB
from persist_lib.kernel.columns import array_of
from persist_lib.storage.sources.postgres.snapshot import Snapshot
from persist_lib.storage.sources.postgres.stream import Transaction
from persist_lib.storage.sources.protocol import ADDRESS, VALUE

TABLE_BYTES = 8 * MIB


def copied_messages(chosen: Snapshot) -> Iterator[pa.Table]:
    """The rows of a snapshot, all at the address just before the log goes on."""
    address, header = chosen.beginning.lsn - 1, chosen.beginning.header.text()
    for lines in chosen.lines():
        yield _table(np.full(len(lines), address, np.uint64), lines, np.zeros(len(lines), np.int32), [header])


def messages_of(transactions: list[Transaction]) -> Iterator[pa.Table]:
    """Tables of some transactions; one that is large may be in several."""
    addresses: list[int] = []
    values: list[bytes] = []
    headers: list[str] = []
    size = 0
    for one in transactions:
        for value, header in zip(one.values, one.headers, strict=True):
            addresses.append(one.address)
            values.append(value)
            headers.append(header)
            size += len(value)
            if size >= TABLE_BYTES:
                yield _listed(addresses, values, headers)
                addresses, values, headers, size = [], [], [], 0
    if values:
        yield _listed(addresses, values, headers)


def _listed(addresses: list[int], values: list[bytes], headers: list[str]) -> pa.Table:
    known = {header: place for place, header in enumerate(dict.fromkeys(headers))}
    places = np.fromiter((known[header] for header in headers), np.int32, len(headers))
    return _table(np.array(addresses, np.uint64), pa.array(values, pa.binary()), places, list(known))


def _table(addresses: Any, values: pa.Array, places: Any, headers: list[str]) -> pa.Table:
    header = pa.DictionaryArray.from_arrays(array_of(places), pa.array(headers, pa.string()))
    return pa.table([array_of(addresses), values, header], schema=pa.schema([ADDRESS, VALUE, ("header", header.type)]))
