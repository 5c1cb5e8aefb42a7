"""When a shard in debt is asked for, and when it is asked for again. Pure: no Dagster, no location."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise

from orchestration.sensors import (
    FIRST_WAIT_MS,
    HOUR_MS,
    LONGEST_WAIT_MS,
    MOST_IN_FLIGHT,
    REMEMBERED,
    Try,
    ask,
    dumps,
    loads,
    mark_of,
)
from persist_lib.core.plan.look import Look
from persist_lib.ids import SeqNo
from persist_lib.maintain.survey import Survey


def survey(*indebted: str, now: int = 1_000_000, mark: str = "4.0", unread: dict[str, str] | None = None) -> Survey:
    looks = {
        name: Look(seqno=SeqNo(7), looked_ms=now, due=("compaction",), debt=100, mark=mark, leases_until=0, done={})
        for name in indebted
    }
    heads = {name: SeqNo(7) for name in (*indebted, *(unread or {}))}
    return Survey(now=now, heads=heads, looks=looks, unread=unread or {}, waiting=0)


def test_debt_is_asked_for_at_once_and_not_again_while_a_run_visits_it() -> None:
    first = ask(survey("a", "b"), (), {})
    assert set(first.now) == {"a", "b"}
    second = ask(survey("a", "b", now=1_000_000 + 10 * HOUR_MS), ("a", "b"), first.tries)
    assert (second.now, second.in_flight) == ((), 2)


def test_debt_that_a_run_did_not_pay_is_asked_for_again_with_growing_pauses() -> None:
    now = 1_000_000
    tries: dict[str, Try] = {}
    asked_at: list[int] = []
    while len(asked_at) < 12:
        asked = ask(survey("a", now=now), (), tries)
        tries = dict(asked.tries)
        if asked.now:
            asked_at.append(now)
        now += 30_000
    pauses = [after - before for before, after in pairwise(asked_at)]
    expected = [min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2**n) for n in range(len(pauses))]
    assert all(pause - 30_000 <= wait <= pause for pause, wait in zip(pauses, expected, strict=True)), pauses
    assert list(accumulate(pauses))[-1] > LONGEST_WAIT_MS


def test_the_pause_begins_when_the_run_has_ended_not_when_it_was_asked_for() -> None:
    first = ask(survey("a", now=0), (), {})
    running = ask(survey("a", now=HOUR_MS), ("a",), first.tries)
    assert ask(survey("a", now=HOUR_MS + FIRST_WAIT_MS - 1), (), running.tries).now == ()
    assert ask(survey("a", now=HOUR_MS + FIRST_WAIT_MS), (), running.tries).now == ("a",)


def test_a_shard_out_of_debt_is_forgotten_and_new_debt_is_asked_for_at_once() -> None:
    tries = ask(survey("a", now=0), (), {}).tries
    assert ask(survey(now=1), (), tries).tries == {}
    assert ask(survey("a", now=2, mark="9.0"), (), {}).now == ("a",)


def test_each_attempt_has_another_mark_and_so_has_other_debt() -> None:
    one = survey("a")
    assert len({mark_of(one, "a", Try(n, 0)) for n in range(1, 5)}) == 4
    assert mark_of(one, "a", Try(1, 0)) != mark_of(survey("a", mark="5.0"), "a", Try(1, 0))
    assert mark_of(one, "a", Try(1, 0)) == mark_of(survey("a"), "a", Try(1, 5))


def test_a_lost_cursor_costs_one_look() -> None:
    asked = ask(survey("a"), (), loads(None, Try))
    assert asked.now == ("a",)
    for broken in ("", "{", "[]", '{"a": 1}', '{"a": [1]}', '{"seen": {"a": 4}, "asked": {}}', "null"):
        assert ask(survey("a"), (), loads(broken, Try)).now == ("a",)
    again = ask(survey("a", now=1_000_000 + FIRST_WAIT_MS), (), asked.tries)
    assert mark_of(survey("a"), "a", again.tries["a"]) != mark_of(survey("a"), "a", asked.tries["a"])


def test_the_cursor_is_bounded_and_keeps_the_last_tries() -> None:
    tries = {f"shard-{n:06}": Try(1, n) for n in range(3 * REMEMBERED)}
    kept = loads(dumps(tries), Try)
    assert len(kept) == REMEMBERED
    assert f"shard-{3 * REMEMBERED - 1:06}" in kept
    assert len(dumps(tries)) < 40 * REMEMBERED
    assert json.loads(dumps({})) == {}


def test_what_was_never_asked_for_goes_before_what_failed_and_nobody_starves() -> None:
    names = [f"s{n:05}" for n in range(MOST_IN_FLIGHT + 500)]
    failed = {name: Try(3, 0) for name in names[:MOST_IN_FLIGHT]}
    now = 10 * HOUR_MS
    first = ask(survey(*names, now=now), (), failed)
    assert set(names[MOST_IN_FLIGHT:]) <= set(first.now)
    assert len(first.now) == MOST_IN_FLIGHT
    second = ask(survey(*names, now=now + 30_000), (), first.tries)
    assert set(first.now) | set(second.now) == set(names)


def test_a_shard_whose_state_cannot_be_read_is_not_asked_to_be_compacted() -> None:
    asked = ask(survey("a", unread={"bad": "Corrupt: …"}), (), {})
    assert asked.now == ("a",)
