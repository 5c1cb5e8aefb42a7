"""gRPC and forks: a child can use gRPC only if it had ended before the fork, as its threads and locks stay behind.

Clients close their connections before a fork and make new ones after it (`servers.Server`). Then gRPC ends by itself,
unless something else of the process uses it: a shard server, a call that does not end, other code. The child refuses
then, in words, as any call in it could wait for ever.
"""

from __future__ import annotations

import os
from pathlib import Path

from persist_lib.errors import InvalidUsage
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.forks import Stage, enrol

THREADS = ("grpc_", "event_engine")
"""How the names of gRPC's own threads begin."""
NOT_YET_RUN = "\nvoluntary_ctxt_switches:\t0\n"
"""How the system says that a thread never waited for anything, and so may not have its name yet."""
TASKS = Path("/proc/self/task")
ENDS_S = 1.0
"""How long a fork waits for gRPC's threads to end. They take some milliseconds."""
LOOK_S = 0.001


class Core:
    """gRPC of this process. Below all that uses it, so that a fork finds the connections closed."""

    def __init__(self, tasks: Path = TASKS) -> None:
        self._tasks, self._runtime = tasks, Runtime(background=False)
        self._process = os.getpid()
        self._is_used = self._is_up = self._is_inherited = False
        self._kept: list[object] = []
        enrol(self, Stage.THREADS)

    def use(self, what: str) -> None:
        """Note that gRPC is about to be used for `what`. Raises InvalidUsage where the process it was forked from did.

        That is, where gRPC had not ended before the fork, or where native code forked.
        """
        if self._is_inherited or self._process != os.getpid():
            raise InvalidUsage(
                f"{what} cannot be used in this process: it was forked while gRPC was in use, by a shard server, by a "
                "call that did not end, by other code, or the fork was one of native code. gRPC does not survive "
                "that, and would wait for ever; nothing was sent. Start the process another way (multiprocessing: "
                "'spawn' or 'forkserver'), or fork before gRPC is used",
                process=os.getpid(),
            )
        self._is_used = True

    def keep(self, inherited: object) -> None:
        """Keep something of the parent's in the child: freeing it could wait for ever."""
        self._kept.append(inherited)

    def before_fork(self) -> None:
        """Wait until gRPC has ended, and note whether it has."""
        deadline = self._runtime.deadline(ENDS_S)
        while (is_up := self._is_there()) and not deadline.has_passed():
            deadline.pause(LOOK_S)
        self._is_up = is_up

    def after_fork_in_parent(self) -> None:
        """Nothing: connections are made again when they are needed."""

    def after_fork_in_child(self) -> None:
        """Note whether gRPC is one that was in use in the parent."""
        self._process, self._is_inherited = os.getpid(), self._is_inherited or self._is_up

    def _is_there(self) -> bool:
        """Whether gRPC has threads. Where the system does not tell threads, whether it was ever used."""
        if not self._tasks.is_dir():
            return self._is_used
        return any(self._may_be_of_grpc(task) for task in self._tasks.iterdir())

    def _may_be_of_grpc(self, task: Path) -> bool:
        """Whether a thread is one of gRPC's by its name, or may be: a new one has its maker's name until it runs.

        One that ends while it is looked at counts, too. The last thread of gRPC is made by one that ends, so a
        list of threads may have neither.
        """
        try:
            return (task / "comm").read_text().startswith(THREADS) or NOT_YET_RUN in (task / "status").read_text()
        except OSError:
            return True


CORE = Core()
