"""Small shards that hold metadata: read whole from the newest state, and changed by compare-and-append.

They are read without a lease, as only their newest contents (or what a hold keeps) are asked for.
"""

from __future__ import annotations

from persist_lib.client import Client
from persist_lib.errors import Indeterminate, LeaseExpired, TimedOut
from persist_lib.read.handle import ReadHandle
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import Schema
from persist_lib.write.handle import WriteHandle


def unheld(client: Client, name: str, schema: Schema) -> ReadHandle:
    """A reader that holds nothing, so that opening it changes nothing. Raises NotFound, and SchemaMismatch."""
    machine = client.machine(name)
    if schema not in machine.fetch().state.schemas:
        client.open_reader(name, schema).close()  # raises SchemaMismatch
    return ReadHandle(machine, client.leases, schema, (client.url, client.consensus_url), read_only=True)


def append_once(write: WriteHandle, rows: list[dict[str, object]], lower: int, upper: int, deadline: Deadline) -> None:
    """Append at an exact upper, and settle an unknown outcome by repeating it, until the deadline.

    Raises UpperMismatch when that is certainly not committed, and Indeterminate when the deadline came first.
    """
    token = write.machine.runtime.token()
    while True:
        try:
            write.compare_and_append(rows, lower, upper, timeout=deadline.left_s(), token=token)
        except (Indeterminate, LeaseExpired):  # after the latter, the handle registers anew
            if deadline.has_passed():
                raise
            deadline.pause(0.05)
        else:
            return


def out_of_time(what: str, deadline: Deadline, why: str, **fields: object) -> TimedOut:
    """The error for a call that did nothing before its deadline."""
    return TimedOut(
        f"{what}: gave up after {deadline.timeout_s:g} s, as {why}. Nothing was changed; try again, or with a longer "
        "timeout",
        timeout_s=deadline.timeout_s, **fields,
    )  # fmt: skip
