"""The changes of some tables as the server's log has them, transaction by transaction, by a copy of the source's slot.

The copy is temporary: it ends with its connection. So any number of instances read at once, each by a copy, while the
source's own slot keeps what they need. An address is the place of a commit in the log. The places of commits go up in
the order in which transactions are given.
"""

from __future__ import annotations

import select
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import generators
from psycopg.pq import ExecStatus

from persist_lib.config import MIB
from persist_lib.errors import Gone
from persist_lib.kernel.columns import array_of
from persist_lib.sources.postgres.kind import Postgres
from persist_lib.sources.postgres.log_messages import Change, Logged, LogMessages, Transaction
from persist_lib.sources.postgres.server import asking, connect, lsn_text, parse_lsn, plain_sql, publication_of, slot_of
from persist_lib.sources.protocol import ADDRESS, VALUE

STATUS = struct.Struct(">cQQQqB")
TABLE_BYTES = 8 * MIB


class Wire:
    """A replication connection. It takes plain SQL as one text, and the commands of walsenders.

    psycopg has no calls for the stream of a slot, so those are libpq's. All waiting is in short pieces, so that Ctrl-C
    is heard.
    """

    def __init__(self, declared: Postgres) -> None:
        self._declared = declared
        self._connection = connect(declared, replication="database")
        self._pg: Any = self._connection.pgconn

    @property
    def process(self) -> int:
        return int(self._connection.info.backend_pid)

    def ask(self, command: str) -> list[tuple[Any, ...]]:
        """Run a command, and answer its rows. Raises Determinate, with the field sqlstate."""
        with asking(self._declared, command):
            found = self._connection.execute(plain_sql(command))
            return found.fetchall() if found.description else []

    def copy(self, command: str) -> Iterator[bytes]:
        """Yield the rows that a COPY sends, each as it is written there."""
        with asking(self._declared, command), self._connection.cursor().copy(plain_sql(command)) as rows:
            yield from map(bytes, rows)

    def start(self, command: str) -> None:
        """Begin a stream."""
        with asking(self._declared, command):
            self._pg.send_query(command.encode())
            *_, result = self._connection.wait(generators.execute(self._pg))
            if result.status != ExecStatus.COPY_BOTH:
                raise psycopg.errors.error_from_result(result)

    def receive(self, wait_s: float) -> Iterator[bytes]:
        """Yield what is there of a stream; if nothing is, what comes in `wait_s`. Raises Determinate at its end."""
        with asking(self._declared, "receive its log"):
            has_waited = False
            while (found := self._pg.get_copy_data(1))[0] >= 0:
                if found[0]:
                    has_waited = True
                    yield bytes(found[1])
                elif has_waited and not self._is_readable(0.0):
                    return
                else:
                    if self._is_readable(0.0 if has_waited else wait_s):
                        self._pg.consume_input()
                    has_waited = True
            for result in self._connection.wait(generators.fetch_many(self._pg)):
                raise psycopg.errors.error_from_result(result)
            raise psycopg.OperationalError("the connection ended")

    def report(self, reached: int, *, asks: bool) -> None:
        """Say that all before a place was received, and ask how far the server is if it `asks`."""
        with asking(self._declared, "receive its log"):
            self._pg.put_copy_data(STATUS.pack(b"r", reached, reached, reached, 0, int(asks)))
            self._pg.flush()

    def close(self) -> None:
        self._connection.close()

    def _is_readable(self, wait_s: float) -> bool:
        return bool(select.select([self._pg.socket], [], [], wait_s)[0])


class Stream:
    """The log from a place on."""

    def __init__(self, declared: Postgres, id_: str, tables: Mapping[int, Logged], start: int) -> None:
        self._log = LogMessages(tables, start)
        self._wire = Wire(declared)
        try:
            self._begin(declared, id_, start)
        except BaseException:
            self._wire.close()
            raise

    @property
    def reached(self) -> int:
        """All transactions that committed before this place were given."""
        return self._log.reached

    def _begin(self, declared: Postgres, id_: str, start: int) -> None:
        wire, slot = self._wire, slot_of(id_)
        copy = f"{slot}_{wire.process}"
        wire.ask(f"SELECT pg_copy_logical_replication_slot('{slot}', '{copy}', true)")
        ((confirmed,),) = wire.ask(
            f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{copy}'"  # noqa: S608
        )
        if parse_lsn(confirmed) > start:
            raise Gone(
                f"the slot {slot} is at {lsn_text(parse_lsn(confirmed))}, and changes of {declared.partition} from "
                f"{lsn_text(start)} on are still needed: it was moved. Nothing of them was written. Begin again "
                "by `persist source reset`",
                partition=declared.partition, address=start,
            )  # fmt: skip
        publication = publication_of(declared, id_).replace('"', '""').replace("'", "''")
        wire.start(
            f'START_REPLICATION SLOT "{copy}" LOGICAL {lsn_text(start)} '
            f"(proto_version '1', publication_names '\"{publication}\"')"
        )

    def receive(self, wait_s: float, *, asks: bool) -> Iterator[Transaction]:
        """Yield the transactions that are there; if there is nothing, wait for something.

        If it `asks`, the server says how far it is. Those without changes of the tables are left out. Raises
        Determinate if the connection broke.
        """
        self._wire.report(self.reached, asks=asks)
        for data in self._wire.receive(wait_s):
            if (done := self._log.take(data)) is not None and done.changes:
                yield done

    def close(self) -> None:
        self._wire.close()


def messages_of(transactions: list[Transaction]) -> Iterator[pa.Table]:
    """Tables of some transactions; one that is large may be in several."""
    addresses: list[int] = []
    changes: list[Change] = []
    size = 0
    for one in transactions:
        for change in one.changes:
            addresses.append(one.address)
            changes.append(change)
            size += len(change.value)
            if size >= TABLE_BYTES:
                yield _listed(addresses, changes)
                addresses, changes, size = [], [], 0
    if changes:
        yield _listed(addresses, changes)


def _listed(addresses: list[int], changes: list[Change]) -> pa.Table:
    values = pa.array([change.value for change in changes], pa.binary())
    headers, tables = (_named([getattr(change, name) for change in changes]) for name in ("header", "table"))
    return message_table(np.array(addresses, np.uint64), values, headers, tables)


def _named(texts: list[str]) -> pa.DictionaryArray:
    """Texts of which few differ."""
    known = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    places = np.fromiter((known[text] for text in texts), np.int32, len(texts))
    return pa.DictionaryArray.from_arrays(array_of(places), pa.array(list(known), pa.string()))


def message_table(
    addresses: Any, values: pa.Array, headers: pa.DictionaryArray, tables: pa.DictionaryArray
) -> pa.Table:  # fmt: skip
    """Messages as a table. Their partitions are the tables that they are about."""
    fields = [ADDRESS, VALUE, ("header", headers.type), ("partition", tables.type)]
    return pa.table([array_of(addresses), values, headers, tables], schema=pa.schema(fields))
