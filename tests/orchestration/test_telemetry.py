"""The trace of a Dagster run: the run, its shards, their duties, and the requests of these."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import persist_lib as persist
from orchestration.definitions import build_definitions
from orchestration.settings import Settings
from persist_lib import telemetry
from tests.otlp import Receiver
from tests.spark.collections import SMALL, write

pytestmark = [pytest.mark.dagster, pytest.mark.timeout(300)]


def test_the_trace_of_a_run_leads_from_the_run_to_each_request(tmp_path: Path) -> None:
    with persist.open(tmp_path) as client:
        for name in ("orders", "customers"):
            write(client, name)
    spans = InMemorySpanExporter()
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    telemetry.use(tracers, MeterProvider(shutdown_on_exit=False))
    try:
        job = build_definitions(Settings(location=f"file:{tmp_path}", config=SMALL)).resolve_job_def("maintenance")
        config = {"ops": {"maintenance_of_shards": {"config": {"engine": "local"}}}}
        with dg.DagsterInstance.ephemeral() as instance:
            result = job.execute_in_process(instance=instance, run_config=config)
    finally:
        telemetry.stop()
    found = spans.get_finished_spans()
    of = {one.context.span_id: one for one in found if one.context}

    def path(span_id: int) -> tuple[str, ...]:
        one = of[span_id]
        return (*(path(one.parent.span_id) if one.parent else ()), one.name)

    paths = {path(span_id) for span_id in of}
    for name in ("orders", "customers"):
        assert ("run maintenance", f"shard {name}", "duty compaction", "set") in paths
    (run,) = [one for one in found if one.parent is None]
    assert (run.attributes or {})["persist.run_id"] == result.run_id
    assert len({one.context.trace_id for one in found if one.context}) == 1


def test_a_process_of_dagster_sends_its_trace_by_otlp_and_no_password(tmp_path: Path) -> None:
    with persist.open(tmp_path / "data") as client:
        write(client, "orders")
    receiver, secret = Receiver(), "hunter2-planted"
    environ = {
        **os.environ, **receiver.environ, "DAGSTER_HOME": str(tmp_path),
        "PERSIST_LOCATION": f"file:{tmp_path / 'data'}", "PGPASSWORD": secret,
        "PERSIST_ALERT_URL": f"http://me:{secret}@127.0.0.1:9/",
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "dagster",
        "job",
        "execute",
        "-m",
        "orchestration.definitions",
        "-j",
        "maintenance",
    ]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    finally:
        receiver.close()
    assert done.returncode == 0, done.stderr[-3000:]
    assert any(path[:3] == ("run maintenance", "shard orders", "duty compaction") for path in receiver.paths), (
        receiver.paths
    )
    assert "persist_duty_seconds" in receiver.names
    assert secret.encode() not in receiver.bytes
