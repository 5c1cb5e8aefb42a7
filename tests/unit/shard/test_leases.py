"""Leases with real clocks and processes: kept up however busy the owner is, and over when it is gone."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.core import commands as c
from persist_lib.core.plan.upkeep import LONGEST_LEASE_MS
from persist_lib.errors import Determinate, LeaseExpired
from persist_lib.ids import SeqNo, format_writer_id
from persist_lib.location.api import Row
from persist_lib.location.sqlite import consensus
from persist_lib.location.sqlite.consensus import SqliteConsensus
from persist_lib.location.stack import Stack, open_stack
from persist_lib.relation.held import kept_of
from persist_lib.shard import heartbeat
from persist_lib.shard.leases import RENEW_BELOW, Registering
from persist_lib.testing import Outcome, Rival, check_swept, check_world, contents_of
from tests.worlds import SCHEMA, Storm, World, row

LEASE_S = 1.0
DAY_S, YEAR_S = 86_400, 365 * 86_400
CONFIG = persist.Config(lease_ms=int(LEASE_S * 1000))
HELD_LEASE_MS = 2000
"""Where a process is tried that renews beside one that is busy: it has half of that, also on a busy machine."""
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file:{tmp_path}/data"


def eventually(holds: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "did not come about"
        time.sleep(0.05)


class Owner:
    """Another process with a client, that does what `body` says and then waits for its input to end."""

    def __init__(self, url: str, body: str, lease_ms: int = CONFIG.lease_ms) -> None:
        program = f"""
import ctypes, os, signal, sys, time
import persist_lib as persist
from tests.worlds import SCHEMA, row
from persist_lib.testing import contents_of
from persist_lib.errors import *
config = persist.Config(lease_ms={lease_ms}, inline_bytes=0)
client = persist.open({url!r}, config=config)
def say(*words):
    print(*words, flush=True)
{textwrap.dedent(body)}
sys.stdin.read()
"""
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def owners() -> Iterator[list[Owner]]:
    started: list[Owner] = []
    yield started
    for owner in started:
        owner.close()


def renewers(parent: int) -> list[int]:
    """The renewing processes of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().decode().split("\0")
            status = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        mine = "persist_lib.shard.heartbeat" in command and status[0] != "Z"
        if mine and command[-2] == str(parent):
            found.append(int(entry.name))
    return found


def renewer(client: persist.Client) -> int:
    process = client.leases._process
    return process.pid if process is not None else 0


def renews(process: int) -> bool:
    """Whether a renewing process has the log open: it has looked at the leases then, and looks again in an instant."""
    try:
        found = [str(one.readlink()) for one in Path(f"/proc/{process}/fd").iterdir()]
    except OSError:
        return False
    return any(one.endswith("consensus.sqlite") for one in found)


@pytest.mark.slow
def test_who_holds_the_interpreter_for_several_leases_keeps_them(url: str, owners: list[Owner]) -> None:
    """SUBTLE: only once the renewing process is there. It takes seconds to start where the machine is busy."""
    body = """
    write, read = client.open_shard("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    say(write.id, read.id)
    sys.stdin.readline()
    ctypes.PyDLL(None).usleep(int(4_500_000))              # no other thread of this process runs
    write.compare_and_append([row(1, time=1)], 1, 2)
    say(contents_of(read.snapshot(1).to_arrow()) == {(1, "w"): 2})
    """
    owners.append(Owner(url, body, HELD_LEASE_MS))
    ids = set(owners[0].hear().split())
    eventually(lambda: any(map(renews, renewers(owners[0].process.pid))), 60)
    with persist.open(url, config=CONFIG) as client:
        owners[0].tell("hold it")
        deadline = time.monotonic() + 4.5
        while time.monotonic() < deadline:
            assert not client.expire("s").overdue
            state = client.inspect("s").state
            assert ids == {*state.writers, *state.readers}
            time.sleep(0.1)
        assert owners[0].hear() == "True"
    assert renewers(owners[0].process.pid)


@pytest.mark.slow
def test_the_lease_of_a_killed_owner_ends_and_its_renewing_process_with_it(url: str, owners: list[Owner]) -> None:
    body = """
    write, read = client.open_shard("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    read.snapshot(0)
    if os.fork() == 0:
        time.sleep(60)                                     # a child that holds the pipe open
    say("ready")
    """
    owners.append(Owner(url, body))
    owners[0].hear()
    eventually(lambda: bool(renewers(owners[0].process.pid)))  # before it is another program, it looks like a fork
    (child,) = children(owners[0].process.pid)
    try:
        owners[0].process.send_signal(signal.SIGKILL)
        owners[0].process.wait()
        eventually(lambda: not renewers(owners[0].process.pid))
        with persist.open(url, config=CONFIG) as client:
            eventually(lambda: client.expire("s").live == 0)
            state = client.inspect("s").state
            assert (dict(state.writers), dict(state.readers)) == ({}, {})
            assert (state.since, state.upper) == (persist.at(0), persist.at(1))
            for _ in range(4):
                client.maintain("s")
            check_swept(client, "s")
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_a_fork_that_closes_what_it_inherited_leaves_its_parents_ids_alone(url: str, owners: list[Owner]) -> None:
    body = """
    write, read = client.open_shard("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    time.sleep(1.0)                                        # the renewing process starts
    child = os.fork()
    if child == 0:
        client.close()
        os._exit(0)
    os.waitpid(child, 0)
    write.compare_and_append([row(1, time=1)], 1, 2)
    say(contents_of(read.snapshot(1).to_arrow()) == {(1, "w"): 2})
    """
    owners.append(Owner(url, body))
    assert owners[0].hear() == "True"
    assert renewers(owners[0].process.pid)


def children(parent: int) -> list[int]:
    """Forks of a process: its children that are no renewing processes."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
            command = (entry / "cmdline").read_bytes().decode() if fields else ""
        except OSError:
            continue
        if fields and int(fields[1]) == parent and "persist_lib.shard.heartbeat" not in command:
            found.append(int(entry.name))
    return found


class Hiccuping(SqliteConsensus):
    """Refuses the first scan of each process, as a server does that is busy for a moment."""

    refused = 0

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        if not self.refused:
            self.refused += 1
            raise Determinate("busy for a moment")
        return super().scan(key, from_seqno, limit)


def refuse(*_: object) -> Stack:
    raise Determinate("no server is there")


@pytest.mark.parametrize("trouble", ["a scan is refused", "it was not there at first"])
def test_the_renewing_process_tries_again_what_the_store_refused_for_a_moment(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    with persist.open(url, config=CONFIG, runtime=persist.Runtime(background=False)) as client:
        write, _ = client.open_shard("s", SCHEMA)
        write.compare_and_append([row(1)], 0, 1)

        def leased_until() -> list[int]:
            return [entry.lease_until for entry in client.inspect("s").state.writers.values()]

        before = leased_until()
        monkeypatch.setattr(heartbeat, "RESCUE_BELOW", 2.0)  # always due
        if trouble == "a scan is refused":
            monkeypatch.setattr(consensus, "SqliteConsensus", Hiccuping)
        else:
            opens: Iterator[Callable[..., Stack]] = iter((refuse, open_stack))
            monkeypatch.setattr(heartbeat, "open_stack", lambda *given: next(opens)(*given))  # noqa: PLW0108
        end, told = os.pipe()
        serving = threading.Thread(target=heartbeat.main, args=(os.getppid(), end))
        serving.start()
        try:
            lines = [[client.url, client.consensus_url, CONFIG.lease_ms], ["keep", "s", write.id]]
            os.write(told, b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            eventually(lambda: leased_until() > before)
        finally:
            os.close(told)
            serving.join()
            os.close(end)
    assert "could not renew" not in caplog.text


@pytest.mark.slow
def test_a_client_that_closes_leaves_no_process_and_no_lease(url: str) -> None:
    with persist.open(url, config=CONFIG) as client:
        client.open_shard("s", SCHEMA)[0].compare_and_append([row(1)], 0, 1)
        eventually(lambda: renewer(client) in renewers(os.getpid()))
        mine = renewer(client)
    eventually(lambda: mine not in renewers(os.getpid()))
    with persist.open(url, read_only=True) as client:
        state = client.inspect("s").state
        assert not state.writers
        assert not state.readers


@pytest.mark.slow
def ended(program: str) -> str:
    """What a program says that ends without closing anything."""
    code = "import os, sys, persist_lib as persist\nfrom tests.worlds import SCHEMA, row\n" + textwrap.dedent(program)
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def test_a_program_that_ends_without_close_leaves_no_lease_and_neither_does_its_fork_end_one(url: str) -> None:
    said = ended(f"""
        client = persist.open({url!r})
        write, read = client.open_shard("s", SCHEMA)
        write.append_now([row(1)])
        read.snapshot(0)
        if os.fork() == 0:
            sys.exit(0)  # as the parent ends: its hooks run
        os.wait()
        state = client.machine("s").fetch().state
        print(len(state.readers), len(state.writers))
    """)
    assert said == "1 1\n"
    with persist.open(url) as client:
        state = client.inspect("s").state
        assert (state.readers, state.writers) == ({}, {})


def test_a_program_ends_in_time_though_its_store_does_not_answer(url: str) -> None:
    started = time.monotonic()
    ended(f"""
        import threading
        from persist_lib.shard import leases
        leases.AT_EXIT_S = 0.2
        client = persist.open({url!r})
        client.open_shard("s", SCHEMA)[0].append_now([row(1)])
        type(client.machine("s")).commit = lambda *_args, **_given: threading.Event().wait()
    """)
    assert time.monotonic() - started < 50


def test_a_renewing_process_that_died_is_replaced(url: str) -> None:
    with persist.open(url, config=CONFIG) as client:
        write, read = client.open_shard("s", SCHEMA)
        write.compare_and_append([row(1)], 0, 1)
        eventually(lambda: renewer(client) in renewers(os.getpid()))
        first = renewer(client)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: renewer(client) != first and renewer(client) in renewers(os.getpid()))
        state = client.inspect("s").state
        assert {write.id, read.id} == {*state.writers, *state.readers}


@pytest.mark.slow
def test_a_reader_that_was_stopped_and_expired_gets_lease_expired_and_never_wrong_data(
    url: str, owners: list[Owner]
) -> None:
    with persist.open(url, config=persist.Config(inline_bytes=0)) as client:
        write, keeper = client.open_shard("s", SCHEMA)
        for at in range(20):
            write.compare_and_append([row(at % 5, "x", at)], at, at + 1)
        body = """
        read = client.open_reader("s")
        iterator, whole = read.snapshot(7).batches(), read.snapshot(7)
        say(read.id)
        sys.stdin.readline()
        for act in (lambda: list(iterator), whole.to_arrow, lambda: read.snapshot(19).to_arrow()):
            try:
                say("data", act())
            except LeaseExpired:
                say("expired")
        """
        owners.append(Owner(url, body))
        reader = owners[0].hear()
        pids = [owners[0].process.pid, *renewers(owners[0].process.pid)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        pids += [pid for pid in renewers(owners[0].process.pid) if pid not in pids]
        keeper.downgrade_since(19)
        eventually(
            lambda: (
                reader in [o.id for o in client.expire("s").overdue] or reader not in client.inspect("s").state.readers
            )
        )
        for _ in range(4):
            client.compact("s", policy=persist.Policy(weight=1e9))
            client.maintain("s")
            kept_of(keeper).move_hold()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        owners[0].tell("go")
        assert [owners[0].hear() for _ in range(3)] == ["expired"] * 3
        check_world(client, "s")


def test_a_failure_in_the_background_ends_no_renewal(world: World) -> None:
    storm = Storm(Outcome.REFUSED, "compare_and_set", "scan")
    client = world.client(persist.Config(lease_ms=10_000, timeout_s=0.5), plan=storm)
    write, read = client.open_shard("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    other = world.client()
    with other.open_writer("s", SCHEMA) as moving:
        moving.advance_upper(5)
    client.inspect("s")
    storm.blows = True
    client.heartbeat()
    world.clock.advance(5)
    client.heartbeat()
    storm.blows = False
    world.clock.advance(1)
    client.heartbeat()
    world.clock.advance(5)
    assert not other.expire("s").overdue
    assert {write.id, read.id} == {*other.inspect("s").state.writers, *other.inspect("s").state.readers}


def test_a_heartbeat_costs_no_blob_operation_and_no_commit_before_it_is_due(world: World) -> None:
    client = world.client(persist.Config(lease_ms=10_000))
    write, read = client.open_shard("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    world.clock.advance(1)
    world.requests.clear()
    for _ in range(10):
        client.heartbeat()
    assert world.count() == world.count("scan") == 10, "nothing is due"
    world.clock.advance(5)
    client.heartbeat()
    assert world.count("compare_and_set") == 1, "both leases at once"
    for _ in range(10):
        client.heartbeat()
    read.downgrade_since(1)
    assert world.count("compare_and_set") == 2
    assert not world.count("get", "get_range", "set", "list", "delete")


def test_a_clock_that_steps_changes_liveness_and_nothing_else(world: World) -> None:
    client = world.client(persist.Config(lease_ms=10_000))
    write, read = client.open_shard("s", SCHEMA)
    for step in (3600, -7200, 10**6, -(10**6)):
        upper = write.fetch_upper().time or 0
        world.clock.advance(step)
        world.client().expire("s")
        try:
            write.compare_and_append([row(1, time=upper)], upper, upper + 1)
        except LeaseExpired:
            write.compare_and_append([row(1, time=upper)], upper, upper + 1)
        try:
            assert contents_of(read.snapshot(upper, diff=True).to_arrow()) == {(1, "w"): upper + 1}
        except LeaseExpired:
            read = client.open_reader("s")
        check_world(client, "s")


def test_a_clock_that_was_years_ahead_leaves_no_lease_for_years(world: World) -> None:
    """A machine starts with a wrong clock, takes leases, corrects it, and dies: its leases end all the same."""
    dead = world.client(persist.Config(inline_bytes=0))
    world.clock.advance(12 * YEAR_S)
    write, read = dead.open_shard("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    assert contents_of(read.snapshot(0, diff=True).to_arrow()) == {(1, "w"): 1}
    world.clock.advance(-12 * YEAR_S)
    client = world.client()
    assert {overdue.id for overdue in client.expire("s", dry_run=True).overdue} == {write.id, read.id}
    assert client.census("s").overdue == 2
    assert len(client.expire("s").overdue) == 2
    assert not client.inspect("s").state.readers
    with pytest.raises(LeaseExpired):
        read.snapshot(0, diff=True)
    for _ in range(3):
        client.maintain("s")
    check_swept(client, "s")


def test_a_clock_that_was_days_ahead_leaves_leases_for_days_and_no_longer(world: World) -> None:
    world.clock.advance(3 * DAY_S)
    dead = world.client(persist.Config(lease_ms=10_000))
    dead.open_shard("s", SCHEMA)[1].fetch_upper()
    world.clock.advance(-3 * DAY_S)
    client = world.client()
    readers = len(client.inspect("s").state.readers)
    assert readers == 1
    world.clock.advance(3 * DAY_S)
    assert client.expire("s").overdue == ()
    world.clock.advance(11)
    assert len(client.expire("s").overdue) == readers


def test_the_longest_lease_that_a_client_asks_for_is_kept(world: World) -> None:
    client = world.client(persist.Config(lease_ms=LONGEST_LEASE_MS))
    write = client.open_writer("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    assert client.expire("s").overdue == ()
    world.clock.advance(-0.001)
    assert [overdue.id for overdue in client.expire("s").overdue] == [write.id]


def test_a_lease_is_never_shortened(world: World) -> None:
    client = world.client(persist.Config(lease_ms=100_000))
    write = client.open_writer("s", SCHEMA)
    write.compare_and_append([row(1)], 0, 1)
    until = client.inspect("s").state.writers[write.id].lease_until
    world.clock.advance(-50)
    write.compare_and_append([row(1, time=1)], 1, 2)
    assert client.inspect("s").state.writers[write.id].lease_until == until


@pytest.mark.parametrize("outcome", [Outcome.LOST_UNKNOWN, Outcome.HAPPENED_UNKNOWN])
def test_closing_in_doubt_is_decided_by_the_state_when_the_log_tells_no_more(world: World, outcome: Outcome) -> None:
    """Its place in the log was truncated before it was sent again: whether the id is still there is what matters."""
    storm = Storm(Outcome.DONE, "compare_and_set", first=outcome)
    rival = Rival(world.inner.consensus)
    client, other = world.client(plan=storm, rival=rival), world.client()
    write = client.open_writer("s", SCHEMA)
    write.compare_and_append([row(0)], 0, 1)

    def others_move_on() -> None:
        theirs = other.open_writer("s", SCHEMA)
        for n in range(1, 7):
            theirs.compare_and_append([row(n, time=n)], n, n + 1)
        for distance in (3, 4):
            other.set_retention("s", distance)
            other.roll_up("s", force=True)
        assert other.collect("s").rows

    id_ = write.id
    rival.before_next(lambda: None)
    rival.before_next(others_move_on)
    storm.blows = True
    client.close()
    assert rival.waiting == 0
    assert id_ not in other.inspect("s").state.writers


EXHAUSTED = """
import logging, resource
logging.basicConfig(stream=sys.stdout, format="%(message)s", force=True)
def say(*words):
    logging.getLogger("owner").warning(" ".join(map(str, words)))  # under the handler's lock, beside other threads
write, read = client.open_shard("s", SCHEMA)
write.compare_and_append([row(1)], 0, 1)
def renewed_until():
    state = client.inspect("s").state
    return min(entry.lease_until for entry in (*state.writers.values(), *state.readers.values()))
client.leases._process.kill()
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
deadline = time.monotonic() + 30
while not client.metrics().lease_failures and time.monotonic() < deadline:
    time.sleep(0.05)
time.sleep(2 * config.lease_ms / 1000)
say("failures", bool(client.metrics().lease_failures))
for fd in held:
    os.close(fd)
before = renewed_until()
deadline = time.monotonic() + 30
while renewed_until() <= before and time.monotonic() < deadline:
    time.sleep(0.05)
say("renewed", renewed_until() > before)
while client.leases._process is None and time.monotonic() < deadline:
    time.sleep(0.05)
say("process", client.leases._process is not None and client.leases._process.poll() is None)
write.compare_and_append([row(2, time=1)], 1, 2)
say("appended", read.snapshot(1).to_arrow().num_rows)
"""


@pytest.mark.slow
def test_leases_are_renewed_again_after_a_moment_without_descriptors(url: str, owners: list[Owner]) -> None:
    owners.append(owner := Owner(url, EXHAUSTED))
    heard: list[str] = []
    while not heard or not heard[-1].startswith("appended"):
        heard.append(owner.hear())
        assert heard[-1], heard
    told = [line for line in heard if "could not start the process that renews leases, which is tried again" in line]
    assert told
    assert [line for line in heard if line.split()[0] in {"failures", "renewed", "process", "appended"}] == [
        "failures True", "renewed True", "process True", "appended 2",
    ]  # fmt: skip


@pytest.mark.slow
def test_no_thread_to_renew_with_means_that_nothing_was_registered(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with persist.open(url, config=CONFIG) as client:
        client.open_writer("s", SCHEMA).close()
        before = client.inspect("s").seqno
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", refuse)
            for attempt in (
                lambda: client.open_writer("s", SCHEMA).compare_and_append([row(1)], 0, 1),
                lambda: client.open_reader("s"),
                lambda: client.worker("s").id,
            ):
                with pytest.raises(Determinate, match="nothing was registered"):
                    attempt()
        assert client.inspect("s").seqno == before
        write, read = client.open_shard("s", SCHEMA)
        write.compare_and_append([row(1)], 0, 1)
        assert contents_of(read.snapshot(0, diff=True).to_arrow()) == {(1, "w"): 1}


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), OSError(errno.EAGAIN, "again"),
                                   MemoryError(), RuntimeError("can't start new thread")])  # fmt: skip
def test_no_process_to_renew_with_is_told_and_the_handle_is_usable(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with persist.open(url, config=CONFIG) as client:
        write = client.open_writer("s", SCHEMA)
        write.compare_and_append([row(1)], 0, 1)
        assert client.metrics().lease_failures >= 1
        assert "which is tried again" in caplog.text
        monkeypatch.undo()
        eventually(lambda: renewer(client) != 0)
        write.compare_and_append([row(1, time=1)], 1, 2)


def test_whatever_fails_in_a_tick_the_next_one_comes(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with persist.open(url, config=CONFIG.model_copy(update={"lease_ms": 400})) as client:
        client.open_writer("s", SCHEMA).compare_and_append([row(1)], 0, 1)
        failing = [MemoryError(), OSError(errno.ENOMEM, "no memory"), RuntimeError("no thread")]
        tick = client.leases.tick

        def fails() -> None:
            if failing:
                raise failing.pop()
            tick()

        monkeypatch.setattr(client.leases, "tick", fails)
        eventually(lambda: not failing)
        eventually(lambda: client.leases.failures >= 3)
        assert client.leases._thread is not None
        assert client.leases._thread.is_alive()


def test_a_new_handle_does_not_let_the_leases_of_older_ones_lapse(world: World) -> None:
    """All ids of a shard are renewed together, and the one that has least left decides when."""
    config = persist.Config(lease_ms=60_000)
    client = world.client(config)
    old = client.open_writer("s", SCHEMA)
    assert old.id
    machine, lease_s = old.machine, config.lease_ms / 1000
    for _ in range(6):
        world.clock.advance(0.4 * lease_s)
        new = client.open_writer("s", SCHEMA)
        assert new.id
        client.heartbeat()
        until = machine.fetch().state.writers[old.id].lease_until
        assert until - machine.consensus.now() >= RENEW_BELOW * config.lease_ms


def test_an_id_whose_registration_was_interrupted_is_retired_when_the_client_closes(world: World) -> None:
    """No tick may come after it, and no handle has it."""
    client, other = world.client(), world.client()
    machine, id_ = client.open_writer("s", SCHEMA).machine, format_writer_id(7)

    def interrupted() -> None:
        with Registering(client.leases, machine, id_):
            machine.commit(lambda _state, now: c.RegisterWriter(id_, "ingest", now + 60_000))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert id_ in other.machine("s").fetch().state.writers
    client.close()
    assert id_ not in other.machine("s").fetch().state.writers
