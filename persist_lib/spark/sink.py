"""The classes by which Spark writes: a batch is one commit, and each epoch of a stream is one, exactly once.

Spark makes a writer in a Python worker of the driver, pickles it for its tasks, and commits in another worker of the
driver. For a stream the committing worker makes a writer of its own. So what the commit needs comes with the answers
of the tasks.

A producer, which the shard remembers for ever, makes an epoch once: its name is the query's, and the id that Spark
keeps in the query's checkpoint; its sequence number is the epoch. Spark runs an epoch again after any failure, with the
same rows. So an outcome that is unknown is decided by the next attempt.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from persist_lib import errors
from persist_lib.arguments import shown
from persist_lib.catalog.staging import CollectionStage
from persist_lib.errors import Damage, DiffOverflow, InvalidUsage, PersistError, Refused
from persist_lib.relation.stage import LEASE_S, Stage
from persist_lib.spark.timeline_rows import RowsTicket
from persist_lib.spark.write_plan import AnyStaged, AnyTicket, AnyWriter, Plan, commit_write, plan_write, write_task

log = logging.getLogger("persist.spark")
QUERY_ID = "sql.streaming.queryId"
"""The local property in which Spark tells tasks of a stream the id in its checkpoint."""
PERMANENT = (InvalidUsage, Refused, DiffOverflow, Damage)
"""Errors of a task that another attempt would only repeat."""
NAME_BYTES = 120


class Answer(WriterCommitMessage):
    """What a task answers: what it staged, or why it never can; and the id of the query that it is a task of."""

    def __init__(self, staged: AnyStaged | None, error: tuple[str, str] | None, query: str | None) -> None:
        self.staged, self.error, self.query = staged, error, query


class Staging(NamedTuple):
    """A stage that a worker of the driver opened, and until when it opens no other (s, monotonic)."""

    ticket: AnyTicket
    until_s: float


_stages: dict[tuple[object, ...], Staging] = {}


class BatchWriter(DataSourceArrowWriter):
    """Writes a batch. Spark makes it where it plans, sends it to the tasks, and commits with it."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        try:
            self._plan = plan_write(options, schema, overwrite=overwrite, is_stream=False)
            self._producer = _batch_producer(options)
            self._ticket = _open_stage(self._plan)
        except PersistError as error:
            raise error.with_traceback(None) from None

    def write(self, iterator: Iterable[pa.RecordBatch]) -> Answer:
        return _answer(self._plan, self._ticket, iterator)

    def commit(self, messages: Sequence[Any]) -> None:
        """Append what all tasks wrote, and retire the stage's id."""
        try:
            if self._plan.base is not None and any(message is None for message in messages):
                raise AssertionError("a task of a statement that replaces all rows gave no answer")
            staged = _staged(messages)
            producer = self._producer
            if producer is not None and (id_ := _query_id(messages)) is not None:
                producer = (f"{producer[0]}@{id_}", producer[1])
                _check_checkpoint(self._plan, *producer)
            done = commit_write(self._plan, staged, producer)
            log.info("%s: %s", self._plan.subject, "was done before" if done is None else done)
        except PersistError as error:
            raise error.with_traceback(None) from None
        self._close()

    def abort(self, messages: Sequence[Any]) -> None:  # noqa: ARG002 - Spark's arguments
        """Delete nothing, as a commit with an unknown outcome may have been made. The audit deletes what is unused."""
        self._close()

    def _close(self) -> None:
        """Retire the stage's id: then nothing that is not appended ever can be, and the audit may delete it."""
        try:
            with self._plan.writer() as write:
                _resumed(write, self._ticket).close()
        except PersistError as error:
            log.warning("%s: could not retire the stage, whose lease ends: %s", self._plan.subject, error)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the epochs of a stream. Spark makes one for each epoch where it plans, and another where it commits."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        try:
            self._name = stream_name(options)
            self._plan = plan_write(options, schema, overwrite=overwrite, is_stream=True)
        except PersistError as error:
            raise error.with_traceback(None) from None
        self._ticket: AnyTicket | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Only a writer that is sent to tasks needs a stage, and only such a one is pickled.
        if self._ticket is None:
            self._ticket = _stage_of(self._plan, self._name)
        return self.__dict__

    def write(self, iterator: Iterable[pa.RecordBatch]) -> Answer:
        if self._ticket is None:
            raise AssertionError("a writer without a stage does not write")
        return _answer(self._plan, self._ticket, iterator)

    def commit(self, messages: Sequence[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Append what all tasks of the epoch wrote, unless that was done before."""
        try:
            staged = _staged(messages)
            if not messages:
                return  # an epoch without tasks
            id_ = _query_id(messages)
            if id_ is None:
                raise InvalidUsage(
                    f"{self._plan.subject}: Spark did not tell the tasks of this stream its id ({QUERY_ID}), so "
                    "that an epoch could not be told from one of another query. Nothing was written"
                )
            producer = (f"{self._name}@{id_}", batchId)
            _check_checkpoint(self._plan, *producer)
            done = commit_write(self._plan, staged, producer)
            log.info("%s: epoch %d %s", self._plan.subject, batchId, "was done before" if done is None else done)
        except PersistError as error:
            raise error.with_traceback(None) from None

    def abort(self, messages: Sequence[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Do nothing. The next attempt of the epoch finds out whether it was committed. The audit deletes the rest."""


def stream_name(options: Mapping[str, str]) -> str:
    """The name of a query: the option `query`, its queryName, or its checkpoint's. Raises InvalidUsage for none."""
    values = {str(name).lower(): value for name, value in options.items()}
    for option in ("query", "queryname"):
        if (text := values.get(option)) is not None and text.strip():
            return _check_name(text.strip(), option)
    if (checkpoint := values.get("checkpointlocation")) is not None and checkpoint.strip():
        path = checkpoint.strip().rstrip("/")
        digest = hashlib.blake2b(path.encode(), digest_size=4).hexdigest()
        return f"{PurePosixPath(path).name[:40] or 'checkpoint'}-{digest}"
    raise InvalidUsage(
        "a streaming write needs a name that stays the same when the query is started again, or its epochs could not "
        'be told apart. Give it a checkpoint of its own, .option("checkpointLocation", "s3://…/orders"), and best a '
        'name too, .option("query", "orders")',
        option="query",
    )  # fmt: skip


def _check_name(name: str, option: str) -> str:
    if not name.isprintable() or "@" in name or len(name.encode()) > NAME_BYTES:
        raise InvalidUsage(
            f"the option {option} is a name of at most {NAME_BYTES} bytes, without an @: got {shown(name)}",
            option=option,
        )
    return name


def _batch_producer(options: Mapping[str, str]) -> tuple[str, int] | None:
    values = {str(name).lower(): value for name, value in options.items()}
    query, epoch = values.get("query"), values.get("epoch")
    if query is None and epoch is None:
        return None
    if query is None or epoch is None:
        raise InvalidUsage(
            "the options query and epoch come together: a batch with the same query and epoch is written once. In "
            "foreachBatch, epoch is the batch id",
            option="epoch" if query is None else "query",
        )
    text = epoch.strip()
    if not (text.isascii() and text.isdigit() and int(text) < 2**63):
        raise InvalidUsage(f"the option epoch must be an integer, 0 or more: got {shown(epoch)}", option="epoch")
    return _check_name(query.strip(), "query"), int(text)


def _open_stage(plan: Plan) -> AnyTicket:
    lower, upper = plan.bounds or (None, None)
    with plan.writer() as write:
        return write.stage(lease_s=plan.lease_s or LEASE_S, lower=lower, new_upper=upper).ticket


def _resumed(write: AnyWriter, ticket: AnyTicket) -> Stage | CollectionStage | RowsTicket:
    return write.resume_stage(ticket)  # type: ignore[arg-type]


def _stage_of(plan: Plan, name: str) -> AnyTicket:
    """The stage of a stream in this process. It serves the epochs of half a lease; then another takes its place."""
    runtime = plan.client.runtime
    place = (os.getpid(), plan.urls, plan.remembering.shard, plan.schema, name, plan.lease_s)
    known = _stages.get(place)
    if known is not None:
        with plan.writer() as write:
            is_live = write.can_append(known.ticket)  # type: ignore[arg-type]
            if is_live and runtime.monotonic() < known.until_s:
                return known.ticket
            # The epochs of the old one are over: a query has one at a time.
            _resumed(write, known.ticket).close()
    ticket = _open_stage(plan)
    _stages[place] = Staging(ticket, runtime.monotonic() + ticket.lease_ms / 2000)
    return ticket


def _answer(plan: Plan, ticket: AnyTicket, batches: Iterable[pa.RecordBatch]) -> Answer:
    context = TaskContext.get()
    query = None if context is None else context.getLocalProperty(QUERY_ID)
    try:
        return Answer(write_task(plan, ticket, batches), None, query)
    except PERMANENT as error:
        # As a value: if it were raised, Spark would try the task three times more, and wrap the message in a traceback.
        return Answer(None, (type(error).__name__, error.message), query)


def _staged(messages: Sequence[Any]) -> list[AnyStaged]:
    """What all tasks staged. Raises the first error of a task."""
    for message in messages:
        if message is not None and message.error is not None:
            kind, text = message.error
            raise getattr(errors, kind, PersistError)(f"{text}. Nothing of this DataFrame was written")
    return [message.staged for message in messages if message is not None]


def _query_id(messages: Sequence[Any]) -> str | None:
    return next((message.query for message in messages if message is not None and message.query), None)


def _check_checkpoint(plan: Plan, producer: str, epoch: int) -> None:
    """Refuse a query that starts again under a name whose epochs are in the shard already, from another checkpoint.

    A new checkpoint starts at epoch 0 and where its source begins. What the old one wrote would be written once
    more, or, if its epochs had the same names, what is new would be taken for what is there.
    """
    machine = plan.remembering
    state = machine.fetch().state
    if producer in state.producers:
        return
    name = producer.partition("@")[0]
    others = {known: last for known, last in state.producers.items() if known.partition("@")[0] == name != known}
    if not others:
        return
    other, last = max(others.items(), key=lambda item: item[1].seqno)
    raise InvalidUsage(
        f"{plan.subject}: the query {name!r} wrote here up to epoch {last.sequence} (v{last.seqno}), with another "
        f"checkpoint than the one that it has now, which is at epoch {epoch}. If its checkpoint was deleted, it begins "
        "again where its source begins, and rows that are here would be written once more. Nothing was written. Start "
        "it with its old checkpoint; or, if these rows are new ones, give the query another name, or forget the old "
        f"one: client.forget_producer({machine.shard!r}, {other!r}, expected={last.sequence})",
        shard=machine.shard, producer=other, last=last.sequence,
    )  # fmt: skip
