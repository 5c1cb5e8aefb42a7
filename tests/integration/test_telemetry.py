"""Figures and traces: the same names and sums by OpenTelemetry and by Prometheus, spans of a run down to requests, and
no secret in any of it."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

import persist_lib as persist
from jobs import compact, scrub
from jobs.signals import run
from persist_lib import telemetry
from persist_lib.core.cost import Cost
from persist_lib.errors import InvalidUsage, PersistError
from persist_lib.location.memory.location import MemoryBlob
from persist_lib.location.wrap.metering import Meter, MeteredBlob
from persist_lib.server.metrics import Measures, figures
from persist_lib.testing import FaultyBlob, Outcome, Script
from tests.otlp import Receiver

ROOT = Path(__file__).parents[2]
SECRET = "hunter2-planted"
SCHEMA = persist.Schema(key={"id": "int64"}, value={"text": "string"})


class Seen:
    """What OpenTelemetry got from this process."""

    def __init__(self) -> None:
        self._spans, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        telemetry.use(self.tracers, MeterProvider([self._reader], shutdown_on_exit=False))

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._spans.get_finished_spans())

    def path(self, span: ReadableSpan) -> list[str]:
        """The names of a span and of those that it is in, the outermost first."""
        of = {one.context.span_id: one for one in self.spans if one.context}
        above = self.path(of[span.parent.span_id]) if span.parent else []
        return [*above, span.name]

    @property
    def figures(self) -> dict[tuple[str, ...], float]:
        """The figures as Prometheus would name them, by name and labels."""
        found: dict[tuple[str, ...], float] = {}
        data: Any = self._reader.get_metrics_data()
        for metric in (one for r in data.resource_metrics for s in r.scope_metrics for one in s.metrics):
            for point in metric.data.data_points:
                labels = tuple(f"{key}={value}" for key, value in sorted(point.attributes.items()))
                if hasattr(point, "bucket_counts"):
                    found[(f"{metric.name}_count", *labels)] = point.count
                    found[(f"{metric.name}_sum", *labels)] = point.sum
                    below = 0
                    for bound, count in zip([*point.explicit_bounds, "+Inf"], point.bucket_counts, strict=True):
                        below += count
                        shown = bound if isinstance(bound, str) else f"{bound:.6g}"
                        found[(f"{metric.name}_bucket", *labels, f"le={shown}")] = below
                else:
                    found[(f"{metric.name}_total", *labels)] = point.value
        return found


@pytest.fixture
def seen() -> Iterator[Seen]:
    try:
        yield Seen()
    finally:
        telemetry.stop()


def prometheus(client: Any) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    registry.register(telemetry.collector(client))
    return {
        (one.name, *(f"{key}={value}" for key, value in sorted(one.labels.items()))): one.value
        for family in registry.collect()
        for one in family.samples
        if not one.name.endswith("_created")
    }


def test_opentelemetry_and_prometheus_have_the_same_names_and_sums(seen: Seen, tmp_path: Path) -> None:
    with persist.open(tmp_path, prices=persist.Prices()) as client:
        write, read = client.open_shard("orders", SCHEMA)
        for time in range(3):
            write.compare_and_append([{"id": time, "text": "x" * 20_000}], time, time + 1)
        assert read.snapshot(2).to_arrow().num_rows == 3
        client.charge(Cost(gets=7, dollars=0.5))
        ours, theirs = prometheus(client), seen.figures
    assert ours["persist_location_calls_total", "call=compare_and_set", "outcome=ok"] > 3
    there = {name: value for name, value in ours.items() if value}
    got = {name: value for name, value in theirs.items() if value}
    # The edge of a bucket belongs to the lower one there and to the upper one here, so only exact edges could differ.
    assert there.keys() == got.keys()
    assert {name: there[name] for name in there} == pytest.approx({name: got[name] for name in there}, rel=1e-9)


def test_an_attempt_that_failed_is_counted_as_one_and_its_span_says_the_kind_of_error_alone(seen: Seen) -> None:
    faulty = FaultyBlob(MemoryBlob(), Script({("get", 1): Outcome.REFUSED}), lambda _: None)
    blob = MeteredBlob(faulty, Meter())
    with telemetry.span("run", "a program"), pytest.raises(PersistError):
        blob.get(f"s/{SECRET}")
    assert seen.figures["persist_location_calls_total", "call=get", "outcome=failed"] == 1
    request, run = seen.spans
    assert (request.attributes or {})["error.type"] == "Determinate"
    assert SECRET not in request.to_json() + run.to_json()


def test_a_request_of_no_run_makes_no_trace(seen: Seen) -> None:
    MeteredBlob(MemoryBlob(), Meter()).get("s/x")
    assert seen.spans == []
    assert seen.figures["persist_location_calls_total", "call=get", "outcome=ok"] == 1


def test_the_spans_of_a_program_are_a_run_its_shards_their_duties_and_requests(
    seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with persist.open(tmp_path) as client:
        for name in ("orders", "customers"):
            write, _ = client.open_shard(name, SCHEMA)
            for time in range(40):
                write.compare_and_append([{"id": time, "text": "x"}], time, time + 1)
    monkeypatch.setattr(sys, "argv", ["compact.py"])
    arguments = ["--location", f"file:{tmp_path}", "--engine", "local"]
    assert run(lambda unfinished: compact.main(arguments, unfinished)) == 0
    paths = {tuple(seen.path(span)) for span in seen.spans}
    for name in ("orders", "customers"):
        run_, shard, duty = "run compact", f"shard {name}", "duty compaction"
        assert (run_, shard, duty, "compare_and_set") in paths
    assert len({span.context.trace_id for span in seen.spans if span.context}) == 1
    (duty_,) = {key for key in seen.figures if key[0] == "persist_duty_seconds_count"}
    assert duty_[1:] == ("duty=compaction", "outcome=ok"), "no shard is a label"


def test_a_process_that_sets_nothing_up_asks_nothing_and_loads_nothing(tmp_path: Path) -> None:
    program = f"""
import sys
import persist_lib as persist
from persist_lib import telemetry
from persist_lib.location.wrap import metering
def refused(*_): raise AssertionError("told")
metering._Kind.tell = refused
with persist.open({str(tmp_path)!r}) as client:
    write, read = client.open_shard("s", persist.Schema(key={{"id": "int64"}}))
    write.compare_and_append([{{"id": 1}}], 0, 1)
    client.maintain("s")
assert telemetry.process.observer is None
assert not [name for name in sys.modules if name.startswith(("opentelemetry", "prometheus"))]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_provider_that_a_program_set_up_is_used_from_the_next_open_on(tmp_path: Path) -> None:
    program = f"""
import persist_lib as persist
from persist_lib import telemetry
from opentelemetry import trace
persist.open({str(tmp_path)!r}).close()
assert telemetry.process.observer is None, "the interface alone does nothing"
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
persist.open({str(tmp_path)!r}).close()
assert telemetry.process.observer is not None
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_another_word_is_refused() -> None:
    with pytest.raises(InvalidUsage, match="PERSIST_TELEMETRY must be otlp"):
        telemetry.configure({"PERSIST_TELEMETRY": "jaeger"})


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    one = Receiver()
    try:
        yield one
    finally:
        one.close()


def persist_command(receiver: Receiver, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **receiver.environ}
    command = [sys.executable, "-m", "persist_lib.cli", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=120)


def test_the_command_sends_its_spans_and_figures_by_otlp(receiver: Receiver, tmp_path: Path) -> None:
    with persist.open(tmp_path) as client:
        write, _ = client.open_shard("orders", SCHEMA)
        for time in range(40):
            write.compare_and_append([{"id": time, "text": "x"}], time, time + 1)
    done = persist_command(receiver, "--location", f"file:{tmp_path}", "maintain", "orders")
    assert done.returncode == 0, done.stderr
    assert ("run maintain", "shard orders", "duty compaction", "compare_and_set") in receiver.paths
    assert receiver.names == set(telemetry.ABOUT) - {"persist_location_dollars"}, "files are free"


def test_no_password_is_sent_also_where_the_run_fails(receiver: Receiver, tmp_path: Path) -> None:
    consensus = f"postgresql://me:{SECRET}@127.0.0.1:1/x?connect_timeout=1"
    command = ("--location", f"file:{tmp_path}", "--consensus", consensus, "maintain", "orders")
    done = persist_command(receiver, *command)
    assert done.returncode in (1, 2)
    assert [span.name for span in receiver.spans if not span.parent_span_id] == ["run maintain"]
    assert SECRET.encode() not in receiver.bytes
    assert b"postgresql:" not in receiver.bytes


def test_each_metric_that_the_board_draws_exists() -> None:
    """A board of figures that are gone shows nothing, and says nothing."""
    measures = Measures(0, lambda: 0.0)
    figures(measures, MagicMock(), MagicMock(), MagicMock(), None, None, 0)
    there = set(re.findall(r"^# TYPE (persist_\w+)", measures.shown().decode(), re.MULTILINE))
    there |= {name if name.endswith("_seconds") else f"{name}_total" for name in telemetry.ABOUT}
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    drawn = [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel["targets"]]
    assert len(drawn) > 15
    for title, expression in drawn:
        names = re.findall(r"persist_\w+", expression)
        assert names, title
        assert {re.sub(r"_seconds_(bucket|sum|count)$", "_seconds", name) for name in names} <= there, title
    groups = [group for _, one in drawn for group in re.findall(r"by \(([\w, ]+)\)", one)]
    labels = {label for group in groups for label in group.split(", ")}
    assert labels == {"call", "outcome", "class", "le", "run", "duty", "refusal"}
    unseen = {name for name in telemetry.ABOUT if not any(name in one for _, one in drawn)}
    assert not unseen, "what is counted is drawn"


def test_a_program_reports_json_lines_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with persist.open(tmp_path) as client:
        client.open_writer("orders", SCHEMA).compare_and_append([{"id": 1, "text": "x"}], 0, 1)
    monkeypatch.setenv("PERSIST_LOG", "json")
    monkeypatch.setattr("logging.root.handlers", list(logging.root.handlers))
    assert scrub.main(["--location", f"file:{tmp_path}", "--engine", "local"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    done = next(line for line in lines if line["event"] == "done")
    assert (done["shard"], done["figures"]["updates"]) == ("orders", 1)
    assert lines[-1]["event"] == "end"
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)
    monkeypatch.setenv("PERSIST_LOG", "yaml")
    with pytest.raises(InvalidUsage, match="PERSIST_LOG must be json"):
        scrub.main(["--location", f"file:{tmp_path}"])


def test_the_command_and_a_server_log_json_lines_where_that_is_asked_for(tmp_path: Path) -> None:
    environ = {**os.environ, "PERSIST_LOG": "json", "PERSIST_LOCATION": f"file:{tmp_path}/data"}

    def run(*words: str, **more: str) -> tuple[int, list[dict[str, Any]]]:
        done = subprocess.run(
            [sys.executable, "-m", "persist_lib.cli", *words], env={**environ, **more}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]

    code, (failed,) = run("maintain")
    assert (code, failed["event"], failed["error"]) == (1, "failed", "NotFound")
    assert datetime.fromisoformat(failed["time"]).tzinfo
    with persist.open(tmp_path / "data") as client:
        client.open_writer("orders", SCHEMA).compare_and_append([{"id": 1, "text": "x"}], 0, 1)
    code, lines = run("maintain", "-v")
    assert (code, {line["event"] for line in lines} <= {"says", "log"}) == (0, True)
    code, (bad,) = run("shard", "show", "nothing", "-v")
    assert (code, bad["error"], bad["trace"].splitlines()[0]) == (1, "NotFound", "Traceback (most recent call last):")
    done = subprocess.run(
        [sys.executable, "-m", "persist_lib.cli", "maintain"], env={**environ, "PERSIST_LOG": "yaml"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "PERSIST_LOG must be json" in done.stderr) == (2, True)
    record = logging.LogRecord("persist.server", logging.WARNING, "", 0, "shard %s: slow", ("s",), None)
    found = json.loads(telemetry.JsonFormatter().format(record))
    assert (found["event"], found["level"], found["says"]) == ("log", "WARNING", "shard s: slow")


def test_a_program_that_finds_damage_ends_with_3(tmp_path: Path) -> None:
    with persist.open(tmp_path) as client:
        client.open_writer("orders", SCHEMA).compare_and_append([{"id": 1, "text": "x" * 50_000}], 0, 1)
    (part,) = (path for path in tmp_path.rglob("*.parquet"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    command = [sys.executable, "-m", "jobs.scrub", "--location", f"file:{tmp_path}", "--engine", "local"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 3, done.stderr
    command = [sys.executable, "-m", "jobs.scrub", "--location", f"file:{tmp_path}", "--shard", "other"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr.startswith("NotFound: ")) == (1, True)
