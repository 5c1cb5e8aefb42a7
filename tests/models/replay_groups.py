"""Traces of the model of rows of several commands (`groups.pml`) on the real code.

A server is what a shard server has of a location (`shard.funnels.Funnels`), whose turns a process takes; a client's
Consensus is one that sends its commands to a server that the driver chooses, and gets no answer where it sends again.
After each step, log and contents are those of the model, and so is what callers were answered. In the end the processes
are gone, and each answer still holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import persist_lib as persist
from persist_lib.catalog.metadata_shard import unheld
from persist_lib.errors import Indeterminate, UpperMismatch
from persist_lib.location.api import Consensus
from persist_lib.location.commands import Answered, MakesHeart, Proposed
from persist_lib.location.wrap.around import AroundConsensus, Operation
from persist_lib.schema.schema import DIFF
from persist_lib.shard.funnels import Funnels, ask
from persist_lib.shard.requests import Request
from persist_lib.testing import Outcome
from persist_lib.testing.checks import check_world
from tests.models.processes import SETS, Mismatch, Process
from tests.models.replay import INLINE, Replay, Step
from tests.worlds import SCHEMA, row

SHARD = "s"
WHEREVER = 9
BEFORE = 100
"""From which id on rows were there when the trace began: one of each client."""
SAID = {"": 0, "committed": 1, "refused": 2}
_ALL = {"CLIENTS": 3, "SENDS": 4, "DOUBTS": 3}


class Network(AroundConsensus):
    """A client's Consensus, which takes commands to the server that is chosen for each sending."""

    def __init__(self, inner: Consensus, process: Process, servers: Sequence[Funnels]) -> None:
        super().__init__(inner)
        self._process, self._servers = process, servers
        self.to = 0
        self.sent: Request | None = None

    def commit_commands(
        self, proposed: Sequence[Proposed], token: bytes, timeout_s: float, *, is_repeated: bool, heart: MakesHeart
    ) -> list[Answered]:
        self._process.request(Operation("send", proposed[0].shard), lambda: None)
        deadline = self._process.client.runtime.deadline(timeout_s)
        (self.sent,) = ask(
            self._servers[self.to], proposed, token, self._process.name, deadline, is_repeated=is_repeated
        )
        self._process.request(Operation("hear", proposed[0].shard), lambda: None)
        if not self.sent.answer.done():
            raise Indeterminate("no answer came", token=token)
        return [self.sent.answer.result()]


class GroupsReplay(Replay):
    """A shard, two servers of it, and clients that append one row each."""

    file = "groups.pml"
    profiles = (_ALL, {**_ALL, "CLIENTS": 2}, {**_ALL, "DOUBTS": 0})
    config = INLINE

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__(steps)
        self.observer = self.observing(self.config)
        self.observer.open_writer(SHARD, SCHEMA).close()
        self.observer.upgrade(SHARD)  # so that a row may have several commands
        self._servers: list[Funnels] = []
        self._networks: dict[str, Network] = {}
        self._late: dict[str, Callable[[], bool]] = {}
        self.said: dict[str, str] = {}
        for number in range(2):
            client = self.process(f"server {number}").client
            self._servers.append(Funnels(client.blob, client.consensus, client.config, client.runtime))
        self.writers = [self._writer(number) for number in range(len(steps[0].numbers("wants")))]
        self.offset = self.observer.machine(SHARD).fetch().seqno

    def wrapped(self, process: Process, consensus: Consensus) -> Consensus:
        if process.name.startswith("server"):
            return consensus
        self._networks[process.name] = Network(consensus, process, self._servers)
        return self._networks[process.name]

    def counts(self, process: Process) -> bool:
        return process.waits_for in {*SETS, "send", "hear"}

    def _writer(self, number: int) -> persist.WriteHandle:
        """A writer of a client, which is registered: it has appended a row through the first server."""
        process, server = self.process(f"client {number}"), self.process("server 0")
        self.said[process.name] = ""

        def begin() -> persist.WriteHandle:
            writer = process.client.open_writer(SHARD, SCHEMA)
            writer.compare_and_append([row(BEFORE + number, "w", number)], number, number + 1)
            return writer

        process.start(begin)
        while process.waits_for is not None:
            if process.waits_for == "hear":
                server.start(self._servers[0].work)
                while server.waits_for is not None:
                    server.step()
            process.step()
        writer: persist.WriteHandle = process.finish()
        return writer

    def carry_out(self, at: int, step: Step) -> None:
        process = self.process(f"{step.who} {step.number}")
        if step.who == "client":
            self._send(process, step)
            return
        match step.what:
            case "take":
                process.start(self._servers[step.number].work)
                process.lost()
            case "commit" | "sent_again":
                process.commits()
                process.finish()
            case "unknown":
                process.commits_in_doubt(Outcome.HAPPENED_UNKNOWN)
            case "late":
                process.commits_in_doubt(Outcome.LOST_UNKNOWN)
                ((key, (expected, data)),) = process.sent.items()
                self._late[process.name] = lambda: self.inner.consensus.compare_and_set(key, expected, data)
            case "arrive":
                if not self._late.pop(process.name)():
                    raise Mismatch("a late compare-and-set lost its race")
            case "found":
                process.finish()
            case _:
                process.lost()
        self._hear()

    def _send(self, process: Process, step: Step) -> None:
        """A client sends for the first time, or again after no answer."""
        number, wanted = step.number, step.numbers("wants")[step.number]
        lower = len(self.writers) + wanted
        if process.waits_for is None and wanted == WHEREVER:
            process.start(lambda: self.writers[number].append_now([{"id": number, "word": "w"}]))
        elif process.waits_for is None:
            process.start(lambda: self.writers[number].compare_and_append([row(number, "w", lower)], lower, lower + 1))
        elif process.waits_for == "hear":
            process.step()
        process.reads()
        if process.waits_for != "send":
            raise Mismatch(f"{process.name} should send again, and is at {process.waits_for}")
        self._networks[process.name].to = step.argument
        process.step()

    def _hear(self) -> None:
        """Clients hear the answers to what they sent last."""
        for number in range(len(self.writers)):
            process = self.process(f"client {number}")
            sent = self._networks[process.name].sent
            if process.waits_for == "hear" and sent is not None and sent.answer.done():
                process.step()
                process.reads()
                self._hears(process)

    def _hears(self, process: Process) -> None:
        if process.waits_for is not None:  # it may still be committed, so that the client sends again
            return
        error, process.error = process.error, None
        if error is not None and not isinstance(error, UpperMismatch):
            raise error
        self.said[process.name] = "committed" if error is None else "refused"

    def modelled(self, step: Step) -> dict[str, object]:
        applied = step.numbers("applied")
        return {
            "seqno": step.number_of("seq") + self.offset,
            "upper": step.number_of("upper") + len(self.writers),
            "applied": Counter({number: count for number, count in enumerate(applied) if count}),
            "said": step.numbers("said"),
        }

    def there(self) -> dict[str, object]:
        version = self.observer.machine(SHARD).fetch()
        return {
            "seqno": version.seqno,
            "upper": version.state.upper.time,
            "applied": self._applied(),
            "said": [SAID[said] for said in self.said.values()],
        }

    def _applied(self) -> Counter[int]:
        found: Counter[int] = Counter()
        with unheld(self.observer, SHARD, SCHEMA).snapshot(diff=True) as snapshot:
            for one in snapshot.to_pylist():
                if one["id"] < BEFORE:
                    found[one["id"]] += one[DIFF]
        return found

    def check(self, step: Step) -> None:
        check_world(self.observer, SHARD)

    def rest(self) -> None:
        """Nothing is left to do: who was answered was answered for ever."""

    def close(self) -> None:
        self.observer.close()
