"""Where a log is: a specifier, and what is opened there."""

from __future__ import annotations

from persist_lib.events.api import Kind, Opening, RecordStore
from persist_lib.events.fragments import check_limit
from persist_lib.events.kinds import load_kind
from persist_lib.events.reading import LogReader
from persist_lib.events.specifier import DEFAULT, Specifier, parse_specifier, take_limit
from persist_lib.events.writing import LogWriter, open_writer
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.resource import Resource


class LogStore(Resource):
    """See `api.Store`. Each writer and each reader opens a driver of its own."""

    def __init__(self, specifier: Specifier, kind: Kind, runtime: Runtime) -> None:
        self.specifier = specifier
        self._kind, self._runtime = kind, runtime
        self._options, self._limit = take_limit(specifier.options)
        check_limit(self._limit)
        self._records: RecordStore | None = None

    def writer(self, *, owner: str = "") -> LogWriter:
        return open_writer(self.open_driver(create=True), str(self.specifier), self._runtime, owner)

    def reader(self) -> LogReader:
        records = self.open_driver(create=False)
        try:
            return LogReader(records, str(self.specifier))
        except BaseException:
            records.close()
            raise

    @property
    def records(self) -> RecordStore:
        if self._records is None:
            self._records = self.open_driver(create=False)
        return self._records

    def open_driver(self, *, create: bool) -> RecordStore:
        """The driver, which the caller closes."""
        records = self._kind.open(self._options, Opening(create, self._runtime))
        if self._limit is not None:
            records.limit = self._limit if records.limit is None else min(self._limit, records.limit)
        return records

    def close(self) -> None:
        if self._records is not None:
            self._records.close()
            self._records = None

    def __repr__(self) -> str:
        return f"<events in {self.specifier}>"


def open_store(specifier: str | Specifier = DEFAULT, *, runtime: Runtime | None = None) -> LogStore:
    r"""Name a store of events, without I/O: `kind[:options]`, as in `disk:./ledger` (`\:` is a colon in an option).

    The option `limit=N` bounds the bytes of a record: longer payloads are kept in fragments. Raises InvalidUsage for an
    unknown kind, with those that there are, and for one whose extra is not installed.
    """
    parsed = specifier if isinstance(specifier, Specifier) else parse_specifier(specifier)
    return LogStore(parsed, load_kind(parsed.kind), runtime or Runtime())
