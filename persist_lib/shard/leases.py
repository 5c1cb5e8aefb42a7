"""Keeping leases up while a process lives, however busy it is.

A daemon thread renews the leases that are due and moves readers' holds. A thread starves when an extension module keeps
the interpreter to itself. So a small process renews leases too, whenever the thread has not. It reads from a pipe and
ends with the pipe. Where the location cannot be opened a second time (memory), there is only the thread.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import IO

from persist_lib.config import Config
from persist_lib.core.commands import Heartbeat, Retire
from persist_lib.core.state import State
from persist_lib.errors import Determinate, Indeterminate, LeaseExpired, NewerFormat, PersistError, Refused
from persist_lib.ids import ReaderId, WriterId
from persist_lib.runtime.ambient import Runtime
from persist_lib.runtime.forks import Stage, enrol
from persist_lib.runtime.threads import Flag, Resource, aside
from persist_lib.shard.commit import Machine

log = logging.getLogger("persist.leases")
EAGER_BELOW_MS = 60_000
"""For shorter leases the renewing process starts at once; for others after `PATIENCE_S`, as short runs need none."""
PATIENCE_S = 5.0
RENEW_BELOW = 0.6
"""The thread renews a lease when less than this share of it is left, the process below `RESCUE_BELOW`."""
RESCUE_BELOW = 0.45

FAREWELL_S = 5.0
"""How long retiring an abandoned id may take, and the end of the thread. The lease ends by itself in any case."""
AT_EXIT_S = 5.0
"""How long a program that ends without `close` may take to retire its ids. What is left ends by itself."""
_begun: weakref.WeakSet[Leases] = weakref.WeakSet()
"""The leases whose thread was started, and so those that may have to be ended when the program ends."""


class Leases:
    """The leases of one client. Ids are kept from `keep` to `drop`; `close` drops all."""

    def __init__(self, config: Config, runtime: Runtime, urls: tuple[str, str] | None) -> None:
        self._config = config
        self._runtime = runtime
        self.urls = urls
        """The URLs of blobs and Consensus; None where no other process can open them (memory)."""
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._kept: dict[str, tuple[Machine, set[str]]] = {}
        self._ticks: dict[int, Callable[[], None]] = {}
        self._abandoned: deque[tuple[Machine, str]] = deque()
        self._wake = Flag()
        self._closed = self._is_leaving = False
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.failures = 0
        """How often a renewal failed, or the start of the renewing process. Each failure was logged and tried again."""
        enrol(self, Stage.SHARDS)

    def after_fork_in_child(self) -> None:
        """Make a new lock. Its holder may be in the parent, as are the thread, process and ids (see `is_inherited`)."""
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Start the renewing thread, if it is not running. Call this before an id is registered that needs it.

        Raises Determinate when this machine has no room for one more thread now; nothing was registered then.
        """
        if not self._runtime.background or self._thread is not None:
            return
        try:
            aside(self._begin_thread)
        except (RuntimeError, MemoryError) as error:
            raise Determinate(
                f"could not start the thread that keeps leases up ({error}); nothing was registered. "
                "Try again when this machine has room for more threads"
            ) from error

    def _begin_thread(self) -> None:
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._renew, name="persist-leases", daemon=True)
                thread.start()
                self._thread = thread
                _begun.add(self)

    def keep(self, machine: Machine, id_: str) -> None:
        """Keep the lease of a registered id up from now on. Raises nothing: the id is registered already."""
        with self._lock:
            self._kept.setdefault(machine.shard, (machine, set()))[1].add(id_)
            if self._process is not None:
                self._tell("keep", machine.shard, id_)
        if self._runtime.background and self._config.lease_ms < EAGER_BELOW_MS:
            aside(self._begin_process)

    def _begin_process(self) -> None:
        with self._lock:
            self._try_start_process()

    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that registered the ids. Ids, thread and pipe are the parent's."""
        return os.getpid() != self._owner

    def retire(self, machine: Machine, id_: str) -> None:
        """Retire an id now and stop renewing it, unless it belongs to the parent process."""
        if not (self.is_inherited() or self._closed):  # closed: `close` retires it
            try:
                self._commit_retirement(machine, id_)
            except (Refused, NewerFormat):
                # The id is expired already, or the shard is finished. Or the shard was upgraded beyond this release,
                # which cannot change it any more: newer programs retire the id when its lease has ended.
                pass
            except Exception:
                self.drop(machine, id_)
                raise
        self.drop(machine, id_)  # last: after an interrupt before this, the id is still kept for `close` to retire

    def _commit_retirement(self, machine: Machine, id_: str) -> None:
        """Retire an id. If the outcome is unknown (the log may have been truncated), the newest state decides."""
        deadline = self._runtime.deadline(self._config.timeout_s)
        try:
            machine.commit(lambda _state, _now: Retire(id_))
        except Indeterminate:
            if deadline.has_passed():
                raise
            machine.fetch()
            machine.commit(lambda _state, _now: Retire(id_), deadline.remaining_s())

    def drop(self, machine: Machine, id_: str) -> None:
        if self.is_inherited():
            return
        with self._lock:
            _, ids = self._kept.get(machine.shard, (machine, set()))
            ids.discard(id_)
            self._tell("drop", machine.shard, id_)

    def abandon(self, machine: Machine, id_: str) -> None:
        """Retire an id at the next tick: its owner was dropped without `close`. Takes no lock: finalizers call it."""
        self._abandoned.append((machine, id_))

    def every_tick(self, owner: object, call: Callable[[], None] | None) -> None:
        """Run `call` at each tick, as readers do to move their holds. None: stop running it."""
        with self._lock:
            if call is None:
                self._ticks.pop(id(owner), None)
            else:
                self._ticks[id(owner)] = call

    def tick(self) -> None:
        """Renew the leases that are due, now. Logs failures; owners of expired ids learn it at their next commit."""
        self._retire_abandoned()
        with self._lock:
            kept = [(machine, tuple(sorted(ids))) for machine, ids in self._kept.values() if ids]
            calls = list(self._ticks.values())
        for call in calls:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - whatever it is, the leases have to be renewed
                self._failed("could not move a hold", error)
        for machine, ids in kept:
            self.failures += not renew(machine, ids, self._config.lease_ms, RENEW_BELOW)

    def close(self) -> None:
        """Stop renewing, and retire the ids that are still kept. Idempotent. In a fork it does nothing."""
        if self.is_inherited():
            return
        self._closed = True
        self._wake.set()
        aside(self._end_renewing)
        self._retire_kept()

    def _retire_kept(self) -> None:
        self._retire_abandoned()  # first, as they are among those that are kept
        # One after the other, so that after an interrupt the next call does the rest.
        while kept := [(machine, id_) for machine, ids in self._kept.values() for id_ in sorted(ids)]:
            _retire(*kept[0])
            self.drop(*kept[0])
        self._retire_abandoned()

    def leave(self) -> threading.Thread | None:
        """The program ends: let the thread retire what is kept, and return it. In a fork, and when closed, nothing.

        The thread does it, as no thread can be begun when the interpreter ends, and as it may be given up.
        """
        if self.is_inherited() or self._closed:
            return None
        self._is_leaving = True
        self._wake.set()
        return self._thread

    def _end_renewing(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(FAREWELL_S)  # otherwise it could use a location that is closed
        with self._lock:
            self._ticks.clear()
            process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _retire_abandoned(self) -> None:
        while self._abandoned:
            machine, id_ = abandoned = self._abandoned[0]
            self.drop(machine, id_)
            _retire(machine, id_)
            with self._lock:  # last, so that an interrupt before this does not lose the id
                if self._abandoned and self._abandoned[0] is abandoned:
                    self._abandoned.popleft()

    def _renew(self) -> None:
        waited_s = 0.0
        while not self._wake.wait(step_s := self._step_s()):
            waited_s += step_s
            # No failure here may end the thread. Otherwise a short lack of descriptors, memory or processes
            # would end every lease for good, even after the lack is over.
            try:
                self.tick()
                with self._lock:
                    if waited_s >= min(PATIENCE_S, self._config.lease_ms / 4000):
                        self._try_start_process()
            except Exception as error:  # noqa: BLE001 - see above
                self._failed("could not renew leases", error)
        if self._is_leaving:
            self._retire_kept()

    def _failed(self, what: str, error: Exception) -> None:
        self.failures += 1
        log.warning("%s, which is tried again: %s: %s", what, type(error).__name__, error)

    def _step_s(self) -> float:
        period_s = self._config.lease_ms / 4000
        return min(period_s, PATIENCE_S) if self._process is None else period_s

    def _try_start_process(self) -> None:
        try:
            self._start_process()
        except (OSError, MemoryError, RuntimeError) as error:
            # No descriptors, memory or processes are left now. The thread continues alone, and tries this again.
            self._failed("could not start the process that renews leases", error)

    def _start_process(self) -> None:
        if self.urls is None or self._closed or not sys.executable:
            return
        if self._process is not None:
            if self._process.poll() is None:
                return
            ended, self._process = self._process, None
            _end(ended)
        command = [sys.executable, "-P", "-m", "persist_lib.shard.heartbeat", str(os.getpid())]
        path = os.pathsep.join(folder for folder in sys.path if folder)
        env = {**os.environ, "PYTHONPATH": path}  # noqa: TID251 - handed on, not read
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env)
        self._tell(*self.urls, self._config.lease_ms)  # not as arguments, which every user of the machine may read
        for shard, (_, ids) in self._kept.items():
            for id_ in ids:
                self._tell("keep", shard, id_)

    def _tell(self, *words: str | int) -> None:
        if self._process is None:
            return
        pipe: IO[bytes] | None = self._process.stdin
        if pipe is None:
            return
        try:
            pipe.write(json.dumps(words).encode() + b"\n")
            pipe.flush()
        except (OSError, ValueError):
            log.warning("the renewing process ended; the thread alone keeps leases up")


class Leased(Resource):
    """A handle with an id of its own, which `close` retires. Where that fails, the lease ends by itself."""


def was_closed(machine: Machine, what: str) -> LeaseExpired:
    """The error for a call on a handle (`what` names its kind) that was closed, by itself or with its client."""
    said = f"this {what} was closed. This call changed nothing; open a new one"
    if machine.is_closed:
        said = f"its client was closed, and this {what} with it. This call changed nothing; open a new client"
    return LeaseExpired(f"shard {machine.shard}: {said}", id="", shard=machine.shard)


class Registering:
    """A block in which an id is registered. After an interrupt it is not known whether it was, so it is abandoned."""

    __slots__ = ("_id", "_leases", "_machine")

    def __init__(self, leases: Leases, machine: Machine, id_: str) -> None:
        self._leases, self._machine, self._id = leases, machine, id_

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            self._leases.abandon(self._machine, self._id)


def renew(machine: Machine, ids: tuple[str, ...], lease_ms: int, below: float) -> bool:
    """Renew the leases of `ids` if one has less than the share `below` left. Logs a failure, and returns False then."""

    def is_due(state: State, now: int) -> bool:
        untils = [
            entry.lease_until
            for id_ in ids
            if (entry := state.writers.get(WriterId(id_)) or state.readers.get(ReaderId(id_))) is not None
        ]
        return bool(untils) and min(untils) - now < below * lease_ms

    try:
        if is_due(machine.state, machine.consensus.now()) and is_due(machine.fetch().state, machine.consensus.now()):
            machine.commit(lambda _state, now: Heartbeat(ids, now + lease_ms), timeout_s=lease_ms / 2000)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again, and other leases are renewed
        log.warning("could not renew the leases of %s on shard %s: %s", ", ".join(ids), machine.shard, error)
        return False
    return True


def _retire(machine: Machine, id_: str) -> None:
    """Retire an id. Failures are logged: its lease ends by itself."""
    try:
        machine.commit(lambda _state, _now: Retire(id_), timeout_s=FAREWELL_S)
    except Refused:
        pass  # expired already, or the shard is finished
    except PersistError as error:
        log.warning("could not retire %s on shard %s: %s", id_, machine.shard, error)


def _leave_all() -> None:
    """End the leases of a program that ends without closing its clients, as far as that takes no longer than a bound.

    Otherwise they would end by themselves only: a script that is started more often than that would never let history
    go.
    """
    left = Runtime().deadline(AT_EXIT_S)
    for thread in [leases.leave() for leases in list(_begun)]:
        if thread is not None:
            thread.join(left.remaining_s())


atexit.register(_leave_all)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        if process.stdin is not None:
            process.stdin.close()
        process.wait(timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        process.kill()
        process.wait()
