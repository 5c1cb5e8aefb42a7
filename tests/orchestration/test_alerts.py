"""Alerts: each thing that is wrong reaches a real receiver once, and once more when it is over, whatever fails."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import urllib3

import persist_lib as persist
from orchestration import health
from orchestration.alerts import MOST_OPEN, Open, Trouble, Webhook, compared, loads
from orchestration.definitions import build_definitions
from orchestration.resources import Persist
from orchestration.settings import Settings, check
from persist_lib.errors import InvalidUsage
from tests.spark.collections import SMALL, write

pytestmark = pytest.mark.dagster
ON_DISK = True
SECRET = "T0K3N-of-the-webhook"


class Receiver:
    """A server that keeps what is posted, and answers as a test says."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.beats = 0
        self.answers: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status = receiver.answers.pop(0) if receiver.answers else 200
                receiver.keys.append(self.headers["Idempotency-Key"])
                if status == 200:
                    receiver.got.append(body)
                self._answer(status)

            def do_GET(self) -> None:
                receiver.beats += 1
                self._answer(200)

            def _answer(self, status: int) -> None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/{SECRET}"

    def said(self) -> list[tuple[str, str]]:
        """What came since the last call: the event, and the key of what is wrong."""
        found = [(one["event"], one["key"]) for one in self.got]
        self.got.clear()
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Watch:
    """The sensor, evaluated as the daemon does, by a clock of the test: each tick is at least one look later."""

    def __init__(self, instance: dg.DagsterInstance, given: Persist, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.instance, self.given = instance, given
        settings = Settings(location=given.location, config=SMALL, alert_url=url, heartbeat_url=f"{url}/beat")
        self.definitions = build_definitions(settings)
        self.cursor: str | None = None
        self.now = 1_700_000_000.0
        self.reason = ""
        monkeypatch.setattr(health, "clock", lambda: self.now)

    def tick(self, seconds: float = 301.0) -> list[Any]:
        """Returns what the tick records."""
        self.now += seconds
        repository = self.definitions.get_repository_def()
        with dg.build_sensor_context(
            instance=self.instance, cursor=self.cursor, repository_def=repository, resources={"persist": self.given}
        ) as context:
            data: Any = repository.get_sensor_def("alerts").evaluate_tick(context)
        self.cursor, self.reason = data.cursor, data.skip_message or ""
        self.given.teardown_after_execution(dg.build_init_resource_context())
        for event in data.asset_events:
            self.instance.report_runless_asset_event(event)
        return list(data.asset_events)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def watch(
    instance: dg.DagsterInstance, given: Persist, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> Watch:  # fmt: skip
    return Watch(instance, given, receiver.url, monkeypatch)


def damage(client: persist.Client, folder: Path) -> Callable[[], None]:
    """Cut a part of the shard `a`, and have a scrub find that. Returns what mends it."""
    write(client, "a", rows=50)
    part = next(path for path in (folder / "blob" / "a").rglob("*.parquet"))
    data = part.read_bytes()
    part.write_bytes(data[:-1])
    client.scrub("a")

    def mend() -> None:
        part.write_bytes(data)
        client.scrub("a")

    return mend


def test_damage_was_sent_once_and_that_it_is_over_whatever_the_receiver_answers(
    client: persist.Client, folder: Path, watch: Watch, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "persist.alerts")
    write(client, "b", rows=5)
    assert len(watch.tick()) == 2, "the first look is recorded"
    assert (receiver.said(), receiver.beats) == ([], 1)
    assert watch.tick() == [], "an idle look records nothing"
    mend = damage(client, folder)
    receiver.answers = [500, 404]
    events = watch.tick()
    assert [type(one).__name__ for one in events] == ["AssetObservation", "AssetCheckEvaluation"]
    assert (events[1].passed, events[1].severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert (receiver.said(), receiver.beats) == ([], 2), "it was refused, and the watcher is not well"
    assert "1 messages could not be sent: damage:table:a: 127.0.0.1 answers with status 500" in watch.reason
    assert watch.tick(60) == []
    assert watch.tick(60) == []
    assert watch.tick() == []
    (message,) = receiver.got
    assert message["location"] == f"file:{folder}"
    assert message["text"].startswith("opened: damage table a: 1 batch is damaged, known since")
    assert (message["do"], message["is_damage"]) == ("persist shard scrub a", True)
    assert receiver.said() == [("opened", "damage:table:a")]
    assert len(set(receiver.keys)) == 1, "each try is the same message"
    mend()
    receiver.answers = [503]
    watch.tick()
    watch.tick()
    watch.tick()
    assert receiver.said() == [("over", "damage:table:a")]
    assert len(set(receiver.keys)) == 2
    assert loads(watch.cursor).open == {}
    logged = [record.message.partition(":")[0] for record in caplog.records if record.name == "persist.alerts"]
    assert logged == ["opened", "over"], "to the log as well, once"
    assert SECRET not in f"{caplog.text} {watch.cursor} {watch.reason}"


def test_what_a_rule_limits_was_sent_once_and_that_it_is_over(
    client: persist.Client, watch: Watch, receiver: Receiver
) -> None:
    """The limits are in the location: the pipeline has no settings of its own for them."""
    table = client.table("orders", persist.Schema({"id": "int64 not null"}, {"n": "int64"}, times="ms"))
    table.append([{"id": 1, "n": 1}])
    watch.tick()
    assert receiver.said() == []
    client.set_rules([{"pattern": "ord*", "still": 0}])
    for _ in range(3):
        watch.tick()
    assert receiver.said() == [("opened", "still:table:orders")]
    client.set_rules([{"pattern": "ord*", "still": "1 hour"}])
    watch.tick()
    watch.tick()
    assert receiver.said() == [("over", "still:table:orders")]


def test_the_check_has_a_button_that_looks_now(
    client: persist.Client, folder: Path, watch: Watch, instance: dg.DagsterInstance
) -> None:
    damage(client, folder)
    key = dg.AssetCheckKey(dg.AssetKey("health"), health.CHECK)
    job = dg.define_asset_job("look", selection=dg.AssetSelection.checks(key))
    look = dg.Definitions.merge(watch.definitions, dg.Definitions(jobs=[job])).resolve_job_def("look")
    (found,) = look.execute_in_process(instance=instance).get_asset_check_evaluations()
    assert (found.passed, found.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert "table a: 1 batch is damaged" in (found.description or "")


def test_a_job_that_fails_was_sent_once_under_retries_until_a_run_succeeds(
    client: persist.Client, folder: Path, watch: Watch, receiver: Receiver, instance: dg.DagsterInstance
) -> None:
    mend = damage(client, folder)
    watch.tick()
    assert receiver.said() == [("opened", "damage:table:a")]
    scrub = watch.definitions.resolve_job_def("scrub")
    ran = scrub.execute_in_process(instance=instance, raise_on_error=False)
    assert not ran.success
    watch.tick(60)
    (message,) = receiver.got
    assert (message["key"], message["link"]) == ("failed:job:scrub", f"/runs/{ran.run_id}")
    assert "its newest run failed: Failed, 1 of 1 shards: a (" in message["says"]
    receiver.said()
    scrub.execute_in_process(instance=instance, raise_on_error=False)
    watch.tick()
    assert receiver.said() == [], "the same trouble"
    mend()
    assert scrub.execute_in_process(instance=instance, raise_on_error=False).success
    watch.tick()
    assert sorted(receiver.said()) == [("over", "damage:table:a"), ("over", "failed:job:scrub")]


def test_a_location_that_does_not_open_was_sent_and_what_it_hides_is_not_over(
    client: persist.Client, folder: Path, watch: Watch, receiver: Receiver
) -> None:
    damage(client, folder)
    watch.tick()
    receiver.said()
    client.close()
    moved = folder.with_name("elsewhere")
    folder.rename(moved)
    watch.tick()
    watch.tick()
    assert receiver.said() == [("opened", "unread:location:all")]
    moved.rename(folder)
    watch.tick()
    assert receiver.said() == [("over", "unread:location:all")], "it is damaged still, and that is known"


def test_a_receiver_that_is_gone_keeps_nothing_from_being_looked_at_and_all_is_sent_later(
    client: persist.Client, folder: Path, watch: Watch, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise OSError(f"cannot reach {receiver.url}")

    mend = damage(client, folder)
    with monkeypatch.context() as gone:
        gone.setattr(urllib3.PoolManager, "request", broken)
        assert len(watch.tick()) == 2
        mend()
        assert len(watch.tick()) == 2
        assert "answers with OSError" in watch.reason
        assert SECRET not in watch.reason
    assert receiver.said() == []
    watch.tick()
    assert receiver.said() == [("opened", "damage:table:a"), ("over", "damage:table:a")]
    watch.tick()
    assert (receiver.said(), loads(watch.cursor).open) == ([], {})


def trouble(number: int, about: str = "table") -> Trouble:
    return Trouble("x", about, str(number), "it is wrong", "persist health")


def test_what_is_too_much_to_tell_is_counted() -> None:
    found = compared({}, map(trouble, range(MOST_OPEN + 20)), 1)
    assert len(found) == MOST_OPEN + 1
    assert found["more:location:all"].trouble.says == f"20 more things are wrong, of {MOST_OPEN + 20}"


def test_what_comes_back_before_it_was_told_to_be_over_was_sent_again_after_that() -> None:
    one = trouble(1)
    before = {one.key: Open(one, 1, was_sent=True, is_over=True)}
    assert compared(before, [one], 5) == before, "first that it was over"
    assert compared({}, [one], 6)[one.key].since == 6


def test_only_what_health_found_is_kept_when_there_was_no_look() -> None:
    known = {one.key: Open(one, 1, was_sent=True) for one in (trouble(1), trouble(2, "job"))}
    found = compared(known, [], 5, is_whole=False)
    assert Counter(one.is_over for one in found.values()) == {False: 1, True: 1}
    assert found["x:job:2"].is_over


def test_after_a_message_that_is_not_taken_no_other_is_tried_in_that_tick(receiver: Receiver) -> None:
    found = {one.key: Open(one, 1) for one in map(trouble, range(3))}
    receiver.answers = [503]
    webhook = Webhook(receiver.url, "", "file:x")
    assert webhook.tell({}, found, 5) == found
    assert len(receiver.keys) == len(webhook.failed) == 1
    left = Webhook(receiver.url, "", "file:x").tell(found, found, 6)
    assert all(one.was_sent for one in left.values())
    assert len(receiver.got) == 3


@pytest.mark.parametrize("cursor", [None, "", "no json", "[]", '{"open": 5}'])
def test_a_cursor_that_cannot_be_read_remembers_nothing(cursor: str | None) -> None:
    assert loads(cursor).open == {}


def test_a_url_of_something_else_is_refused_without_showing_it() -> None:
    with pytest.raises(InvalidUsage, match="alert_url must be a URL of http or https") as raised:
        check(Settings(location="file:./data"), {"PERSIST_ALERT_URL": f"slack:{SECRET}"})
    assert SECRET not in str(raised.value)
