"""What instances say of themselves, what is seen of those that cannot, and the alerts that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.errors import InvalidUsage
from persist_lib.sources import Decoding, Limits, Mark, Meaning, Sources, health, judge, running
from persist_lib.sources.files.reader import LineFiles
from persist_lib.sources.health import Report
from persist_lib.sources.protocol import Lag
from tests.unit.sources.test_running import Place, row


def states(place: Place) -> dict[str, str]:
    return {str(one["instance"]): str(one["state"]) for one in place.sources.show("s").instances}


def report(place: Place, instance: str) -> Report:
    client = place.world.client()
    return Report(client.controller(), place.sources.find("s").health, instance, "ms")


def verdicts(place: Place, **limits: Any) -> dict[str, bool]:
    return {one.check: one.passed for one in judge(place.sources.show("s"), Limits(**limits))}


def test_a_killed_process_is_unseen_after_five_minutes_and_forgotten_later(place: Place) -> None:
    place.create()
    for instance, state in (("killed", "running"), ("ended", "stopped"), ("broke", "failed")):
        report(place, instance).say(state, "", None)  # type: ignore[arg-type]
    assert states(place) == {"killed": "running", "ended": "stopped", "broke": "failed"}
    assert len(place.sources.show("s").alive) == 1
    place.world.clock.advance(6 * 60)
    assert states(place) == {"killed": "unseen", "ended": "stopped", "broke": "failed"}
    (why,) = [one["why"] for one in place.sources.show("s").instances if one["instance"] == "killed"]
    assert why == "not seen for 6 min; before that running"
    place.world.clock.advance(3600)
    last = report(place, "last")
    last.say("running", "")
    assert states(place) == {"last": "running", "broke": "failed"}, "tidied by an instance at work"
    place.world.clock.advance(24 * 3600)
    last.say("running", "")
    assert states(place) == {"last": "running"}
    last.close()


def test_that_the_health_cannot_be_tidied_stops_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.create()

    def fails(*_: object) -> list[Any]:
        raise persist.LeaseExpired("slow")

    monkeypatch.setattr("persist_lib.sources.health.fetch_rows", fails)
    place.write("a.jsonl", row(1))
    place.catch_up()
    assert place.words() == {1: "a"}


def test_lag_is_told_by_partition_in_what_the_reader_knows(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.Ingestion, "step_bytes", 30)
    place.create()
    for name in "ab":
        place.write(f"{name}.jsonl", *(row(n) for n in range(10)))
    place.world.clock.advance(1)
    seen: list[Any] = []
    place.sources.run("s", told=seen.append, stop=lambda: len(seen) >= 2)
    found = place.sources.show("s")
    assert found.left == {}, "the instance has ended"
    (health_row,) = found.instances
    assert health_row["lag_bytes"] == sum(seen[-1].lag.values()) > 0
    assert (health_row["lag_messages"], health_row["held_back_bytes"]) == (None, None)
    other = report(place, "alive")
    other.progress(seen[-1])
    left = place.sources.show("s").left
    assert set(left) == {"a.jsonl", "b.jsonl"}
    for partition, one in left.items():
        assert one == {"left": seen[-1].lag[partition], "messages": None, "bytes": one["left"], "seconds": None}
    other.close()


def test_what_a_reader_tells_more_is_told_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def lags(self: LineFiles, marks: Mapping[str, Mark]) -> Mapping[str, Lag]:
        now = place.sources.client.consensus.now()
        return {partition: Lag(3, 200, now - 7000) for partition in marks}

    monkeypatch.setattr(LineFiles, "lags", lags)
    monkeypatch.setattr(LineFiles, "lag", lambda _self, marks: dict.fromkeys(marks, 200))
    monkeypatch.setattr(LineFiles, "held_back", lambda _self: (5 << 30, "5 GiB of WAL"), raising=False)
    place.create()
    place.write("a.jsonl", row(1))
    done = place.catch_up()
    assert done.behind["a.jsonl"] == running.Behind(3, 200, 7.0)
    assert (done.held_back, done.warning) == (5 << 30, "5 GiB of WAL")
    one = report(place, "x")
    one.progress(done)
    (health_row,) = [each for each in place.sources.show("s").instances if each["instance"] == "x"]
    assert (health_row["state"], health_row["why"]) == ("lagging", "5 GiB of WAL")
    assert (health_row["lag_messages"], health_row["lag_bytes"], health_row["held_back_bytes"]) == (3, 200, 5 << 30)
    one.close()
    assert verdicts(place, held_back_bytes=1 << 30)["held_back"] is False
    assert verdicts(place, held_back_bytes=None)["held_back"] is True
    assert verdicts(place, lag_messages=2)["lag"] is False
    assert verdicts(place, lag_bytes=200)["lag"] is True


def test_alerts_on_instances_lag_and_errors(place: Place) -> None:
    place.create()
    assert verdicts(place) == {"instances": False, "lag": False, "errors": True, "held_back": True, "unread": True}
    assert verdicts(place, instances=0, behind_s=None)["lag"] is True
    one = report(place, "x")
    place.write("a.jsonl", row(1), b"bad")
    instance = place.sources.open("s")
    place.world.clock.advance(1)
    one.progress(instance.step())
    instance.close()
    assert verdicts(place) == {"instances": True, "lag": True, "errors": False, "held_back": True, "unread": True}
    assert verdicts(place, errors_share=0.6)["errors"] is True
    assert verdicts(place, errors_share=None, errors=0)["errors"] is False
    assert verdicts(place, instances=2)["instances"] is False
    assert place.sources.show("s").errors == 1
    place.world.clock.advance(3600)
    assert verdicts(place)["instances"] is False
    (says,) = [alert.says for alert in judge(place.sources.show("s")) if alert.check == "lag"]
    assert says.startswith("3,6")
    place.sources.pause("s", why="maintenance")
    found = {alert.check: alert for alert in judge(place.sources.show("s"))}
    assert (found["instances"].passed, found["instances"].says) == (True, "it is paused: maintenance")
    assert found["lag"].passed
    one.close()


def test_a_failed_instance_says_why_in_the_alert(place: Place) -> None:
    place.create(meaning=Meaning(most_errors=0))
    place.write("a.jsonl", b"bad")
    with pytest.raises(persist.PersistError):
        place.catch_up()
    (says,) = [alert.says for alert in judge(place.sources.show("s")) if alert.check == "instances"]
    assert says.startswith("the last one failed: Refused")


def test_a_failure_that_is_over_is_not_told(place: Place) -> None:
    """An instance failed, another one worked and ended: nothing is at work, and nothing failed last."""
    place.create(meaning=Meaning(most_errors=0))
    place.write("a.jsonl", b"bad")
    with pytest.raises(persist.PersistError):
        place.catch_up()
    place.world.clock.advance(60)
    later = report(place, "y")
    later.say("running", "")
    later.say("stopped", "")
    (says,) = [alert.says for alert in judge(place.sources.show("s")) if alert.check == "instances"]
    assert says == "0 at work, and 1 should be"


@pytest.mark.parametrize("limits", [{"instances": -1}, {"behind_s": "1"}, {"errors_share": 2}, {"errors_share": True}])
def test_limits_that_are_none_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsage):
        Limits(**limits)


def test_a_row_names_the_partitions_that_have_most_left(place: Place) -> None:
    lag = {f"p{n}": n for n in range(1, 500)}
    progress = running.Progress(1, 0, 0, lag, 0, True)
    place.create(decoding=Decoding(decoder="json"))
    one = report(place, "x")
    one.progress(progress)
    left = Sources(place.world.client().controller()).show("s").left
    assert len(left) == health.MOST_PARTITIONS
    assert left["p499"]["left"] == 499
    one.close()
