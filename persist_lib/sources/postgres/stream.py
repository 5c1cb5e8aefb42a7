"""The changes of one table as the server's log has them, transaction by transaction, by a copy of the source's slot.

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
from persist_lib.sources.postgres.log_messages import LogMessages, Transaction
from persist_lib.sources.postgres.server import (
    Table,
    asking,
    connect,
    lsn_text,
    parse_lsn,
    plain_sql,
    publication_of,
    slot_of,
)
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

    def __init__(
        self, declared: Postgres, id_: str, table: Table, start: int, numbers: Mapping[str, int] | None = None
    ) -> None:
        self._log = LogMessages(table.oid, start, numbers or {})
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
                f"the slot {slot} is at {lsn_text(parse_lsn(confirmed))}, and changes of {declared.table} from "
                f"{lsn_text(start)} on are still needed: it was moved. Nothing of them was written. Begin again "
                "by `persist source reset`",
                partition=declared.table, address=start,
            )  # fmt: skip
        publication = publication_of(declared, id_).replace('"', '""').replace("'", "''")
        wire.start(
            f'START_REPLICATION SLOT "{copy}" LOGICAL {lsn_text(start)} '
            f"(proto_version '1', publication_names '\"{publication}\"')"
        )

    def receive(self, wait_s: float, *, asks: bool) -> Iterator[Transaction]:
        """Yield the transactions that are there; if there is nothing, wait for something.

        If it `asks`, the server says how far it is. Those without changes of the table are left out. Raises
        Determinate if the connection broke.
        """
        self._wire.report(self.reached, asks=asks)
        for data in self._wire.receive(wait_s):
            if (done := self._log.take(data)) is not None and done.values:
                yield done

    def close(self) -> None:
        self._wire.close()


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
    return message_table(np.array(addresses, np.uint64), pa.array(values, pa.binary()), places, list(known))


def message_table(addresses: Any, values: pa.Array, places: Any, headers: list[str]) -> pa.Table:
    """Messages as a table; `places` says which header is whose."""
    header = pa.DictionaryArray.from_arrays(array_of(places), pa.array(headers, pa.string()))
    return pa.table([array_of(addresses), values, header], schema=pa.schema([ADDRESS, VALUE, ("header", header.type)]))
