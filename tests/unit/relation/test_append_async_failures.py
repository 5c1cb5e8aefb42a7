"""What a failed append that was accepted earlier means for its future, for those behind it and for the next call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import (
    Determinate,
    LeaseExpired,
    NotSent,
    TimedOut,
    UpperMismatch,
)
from persist_lib.testing import Outcome, Script, check_world
from tests.gated import LONG_S, Threaded, lose
from tests.worlds import SCHEMA, SMALL, World, row


def test_a_lost_race_fails_all_that_were_sent_together_and_all_behind_and_writes_none(
    make: Callable[..., Threaded],
) -> None:
    """The rival moves upper to exactly where the later ones begin: they must not slip in behind somebody else's."""
    t = make()
    first = t.outstanding()
    rest = [t.write.append_async([row(n, time=n)], n, n + 1) for n in range(1, 4)]
    t.other.open_writer("s", SCHEMA).compare_and_append([row(-1)], 0, 1)
    t.gate.open.set()
    with pytest.raises(UpperMismatch):
        first.result(LONG_S)
    for future in rest:
        with pytest.raises(NotSent) as told:
            future.result(LONG_S)
        assert isinstance(told.value.earlier, UpperMismatch)
        assert isinstance(told.value.__cause__, UpperMismatch)
    assert t.contents(0) == {(-1, "w"): 1}
    # Everybody knows now.
    t.write.append_async([row(1, time=1)], 1, 2).result(LONG_S)
    check_world(t.other, "s")


def test_together_they_fail_with_one_reason_and_an_error_each(make: Callable[..., Threaded]) -> None:
    t = make()
    first = t.outstanding()
    rest = [t.write.append_async([row(n, time=n)], n, n + 1) for n in range(1, 4)]
    rival = t.other.open_writer("s", SCHEMA)
    first.add_done_callback(lambda _: rival.compare_and_append([row(-1, time=1)], 1, 3))
    t.gate.open.set()
    errors = [future.exception(LONG_S) for future in rest]
    assert all(isinstance(error, UpperMismatch) and error.actual == persist.at(3) for error in errors)
    assert len({id(error) for error in errors}) == 3
    assert t.contents(2) == {(0, "w"): 1, (-1, "w"): 1}


CALLS: dict[str, Callable[[persist.WriteHandle], Any]] = {
    "append_async": lambda write: write.append_async([row(1, time=1)], 1, 2).result(LONG_S),
    "compare_and_append": lambda write: write.compare_and_append([row(1, time=1)], 1, 2),
    "append": lambda write: write.append([row(1, time=1)], 1, 2),
    "advance_upper": lambda write: write.advance_upper(2),
    "finish": lambda write: write.finish(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_failure_that_nobody_knows_of_fails_the_next_call_once(make: Callable[..., Threaded], call: str) -> None:
    t = make()
    lose(t)
    with pytest.raises(NotSent, match="upper is"):
        CALLS[call](t.write)
    assert t.other.inspect("s").state.upper == persist.at(1)
    CALLS[call](t.write)
    assert t.other.inspect("s").state.upper > persist.at(1)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("look", ["result", "exception"])
def test_a_failure_that_somebody_looked_at_fails_nothing(make: Callable[..., Threaded], call: str, look: str) -> None:
    t = make()
    first = lose(t)
    with suppress(UpperMismatch):
        getattr(first, look)()
    CALLS[call](t.write)


def test_flush_and_close_raise_what_it_was(make: Callable[..., Threaded]) -> None:
    t = make()
    lose(t)
    with pytest.raises(UpperMismatch):
        t.write.flush()
    t.write.flush()
    t = make()
    lose(t)
    with pytest.raises(UpperMismatch):
        t.write.close()
    assert not t.other.inspect("s").state.writers.keys() & {"w"}
    t.write.close()


@pytest.mark.parametrize("of", ["write", "client"])
def test_the_end_of_a_block_does_not_hide_what_went_wrong_in_it(make: Callable[..., Threaded], of: str) -> None:
    t = make()

    def fail() -> None:
        with getattr(t, of):
            lose(t)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    t = make()
    with pytest.raises(UpperMismatch), getattr(t, of):
        lose(t)


def test_what_was_accepted_in_a_block_is_written_at_its_end_also_after_an_exception(
    make: Callable[..., Threaded],
) -> None:
    t = make()
    with t.write:
        for n in range(20):
            t.write.append_async([row(n, time=n)], n, n + 1)
    assert len(t.contents(19)) == 20
    t = make()

    def fail() -> None:
        with t.write:
            t.write.append_async([row(0)], 0, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(t.contents(0)) == 1
    with pytest.raises(LeaseExpired):
        t.write.append_async([row(1, time=1)], 1, 2)


def test_closing_fails_what_does_not_make_it_in_time(make: Callable[..., Threaded]) -> None:
    t = make(persist.Config(timeout_s=0.3))
    first = t.outstanding()
    second = t.write.append_async([row(1, time=1)], 1, 2)
    opening = threading.Timer(1.0, t.gate.open.set)
    opening.start()
    with pytest.raises(TimedOut, match="1 appends that it had accepted were not sent") as told:
        t.write.close()
    opening.join()
    assert "continue" not in told.value.message, "they do not"
    assert "Nothing of those was written" in told.value.message
    assert first.result(LONG_S).upper == persist.at(1), "it was on its way, and its lease was kept so long"
    with pytest.raises(NotSent, match="closed before its turn came"):
        second.result(LONG_S)
    assert len(t.contents(0)) == 1


def test_one_whose_timeout_has_passed_when_its_turn_comes_is_not_sent(make: Callable[..., Threaded]) -> None:
    t = make()
    first = t.outstanding()
    late = t.write.append_async([row(1, time=1)], 1, 2, timeout=0.05)
    behind = t.write.append_async([row(2, time=2)], 2, 3)
    time.sleep(0.1)
    t.gate.open.set()
    first.result(LONG_S)
    with pytest.raises(TimedOut):
        late.result(LONG_S)
    # It may have gone along with the one whose time had come, and fails likewise.
    with pytest.raises((NotSent, TimedOut)):
        behind.result(LONG_S)
    assert t.write.fetch_upper() == persist.at(1)


def test_a_failed_upload_fails_those_sent_together_and_leaves_nothing(world: World) -> None:
    plan = Script({("set", n): Outcome.REFUSED for n in range(1, 200)})
    client = world.client(SMALL.model_copy(update={"timeout_s": 0.2}), plan=plan)
    write = client.open_writer("s", SCHEMA, batching=persist.Batching(bytes=10**6, age_s=100))
    futures = [write.append_async([row(n, time=n)], n, n + 1) for n in range(3)]
    with pytest.raises(Determinate):
        write.flush()
    assert all(type(future.exception()) is Determinate for future in futures)
    assert client.inspect("s").state.upper == persist.at(0)
