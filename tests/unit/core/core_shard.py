"""A shard in memory for tests of the log and the commit loop: a machine, and short ways to change the shard."""

from __future__ import annotations

from persist_lib.config import Config
from persist_lib.core import commands as c
from persist_lib.core.state import Batch, Part, State
from persist_lib.format.paths import blob_key, rollup_key
from persist_lib.frontier import at
from persist_lib.ids import PartKey, SeqNo, ShardId, WriterId, format_writer_id
from persist_lib.location.api import Blob, Consensus
from persist_lib.location.memory.location import MemoryBlob, MemoryConsensus
from persist_lib.schema.schema import Schema
from persist_lib.shard.commit import Build, Committed, Machine
from persist_lib.shard.log import encode_rollup
from persist_lib.testing.faults import ManualClock

SHARD = ShardId("orders")
WRITER = format_writer_id(1)
SCHEMA = Schema(key={"id": "int64"})
CREATE = c.Create(SCHEMA)


class Store:
    """One location, and machines on it: each is what one process would have."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.blob: Blob = MemoryBlob()
        self.consensus: Consensus = MemoryConsensus(self.clock)
        self.seed = 0

    def machine(self, blob: Blob | None = None, consensus: Consensus | None = None) -> Machine:
        """A process that knows nothing yet."""
        self.seed += 1
        runtime = self.clock.runtime(self.seed)
        return Machine(SHARD, blob or self.blob, consensus or self.consensus, Config(timeout_s=5.0), runtime)

    def created(self) -> Machine:
        """A machine on a shard with one writer."""
        machine = self.machine()
        machine.commit(always(CREATE))
        machine.commit(always(c.RegisterWriter(WRITER, "ingest", 2**62)))
        return machine


def always(command: c.Command) -> Build:
    """Builds the same command from whatever state."""
    return lambda _state, _now: command


def batch(lower: int, upper: int, rows: int = 1) -> Batch:
    """An inline batch of `rows` updates."""
    part = Part(PartKey(""), 1, rows, bytes(16), b"", b"", lower, upper - 1, 0, b"x")
    return Batch(0, 1, at(lower), at(upper), at(0), rows, rows, rows, (part,), (0,))


def appending(lower: int, upper: int, token: bytes, writer: WriterId = WRITER) -> Build:
    """Builds an append of one update at exactly `lower`."""
    return always(c.CompareAndAppend(writer, token, batch(lower, upper), 0))


def append_next(machine: Machine, times: int = 1) -> Committed:
    """Append batches wherever upper is."""

    def build(state: State, _now: int) -> c.Command:
        lower = state.upper.time or 0
        return c.CompareAndAppend(WRITER, lower.to_bytes(8, "big"), batch(lower, lower + 1), 0)

    answers = [machine.commit(build) for _ in range(times)]
    return answers[-1]


def roll_up(machine: Machine, entropy: int = 1) -> SeqNo:
    """Store a copy of the newest state, and link it."""
    version = machine.fetch()
    key = rollup_key(version.seqno, entropy)
    data, rollup = encode_rollup(version, key)
    machine.blob.set(blob_key(SHARD, key), data)
    machine.commit(always(c.AddRollup(WRITER, version.seqno, rollup)))
    return version.seqno
