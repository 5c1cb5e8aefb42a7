"""Figures and traces of this process for OpenTelemetry and Prometheus, by the names that a shard server's page has too;
and lines of its log as JSON.

What counts every request (`location.wrap.metering`) tells an observer of it, where there is one. There is one once
OpenTelemetry is set up in the process: `persist.open` looks, `use` takes providers, and `configure` sets it up by the
environment, as jobs, the command and Dagster's runs do. The extra `persist-lib[otel]` has what that needs.

    prometheus_client.REGISTRY.register(telemetry.collector(client))    # of a long-lived program, without OpenTelemetry

Spans: a run, its shards, their duties, and the requests of these. Names of shards are in spans and never in figures, so
that the number of series is bounded. Neither has URLs, keys of objects, or messages of errors, which may have secrets.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from persist_lib.arguments import shown
from persist_lib.errors import InvalidUsage

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

T = TypeVar("T")
P = ParamSpec("P")

NAME = "persist_lib"
VARIABLE, LOG = "PERSIST_TELEMETRY", "PERSIST_LOG"
FLUSH_S = 5.0
CALLS, CALL_SECONDS = "persist_location_calls", "persist_location_call_seconds"
SENT, RECEIVED = "persist_location_sent_bytes", "persist_location_received_bytes"
REQUESTS, DOLLARS = "persist_location_requests", "persist_location_dollars"
ABOUT: Mapping[str, str] = {
    CALLS: "Operations on the location, by what came of them; each attempt counts",
    CALL_SECONDS: "How long these took",
    SENT: "Bytes of data sent",
    RECEIVED: "Bytes of data received",
    REQUESTS: "Requests of these operations, and of what other processes did, by the class in which they are billed",
    DOLLARS: "Their price in dollars",
    "persist_run_seconds": "How long runs of programs and of Dagster's jobs took, by what came of them",
    "persist_duty_seconds": "How long duties on a shard took, by what came of them; dry runs are left out",
}
"""The figures. Counters end in `_total` where Prometheus reads them."""
EXPONENTS = range(10, 27)
"""Buckets of seconds are powers of two of a microsecond: 1 ms to 67 s."""
SECONDS = [2**exponent / 1e6 for exponent in EXPONENTS]


class Process:
    """Who observes this process. By default nothing does: then an operation looks at this field, and that is all."""

    observer: Observer | None = None


process = Process()


class Observer:
    """Makes spans and figures of each operation, of its requests, and of what another process did."""

    def __init__(self, tracers: TracerProvider | None, meters: MeterProvider | None) -> None:
        from opentelemetry import metrics, trace  # noqa: PLC0415 - an extra, loaded where it is set up

        self._trace = trace
        self._tracer = trace.get_tracer(NAME, tracer_provider=tracers)
        meter = metrics.get_meter(NAME, meter_provider=meters)
        self._counters = {name: meter.create_counter(name, description=ABOUT[name]) for name in (CALLS, REQUESTS)}
        self._counters |= {name: meter.create_counter(name, "By", ABOUT[name]) for name in (SENT, RECEIVED)}
        self._counters[DOLLARS] = meter.create_counter(DOLLARS, description=ABOUT[DOLLARS])
        self._seconds = {
            name: meter.create_histogram(name, "s", ABOUT[name], explicit_bucket_boundaries_advisory=SECONDS)
            for name in ABOUT
            if name.endswith("_seconds")
        }

    def operated(self, call: str, seconds: float, sent: int, received: int, *, failed: bool) -> None:
        of = {"call": call}
        self._counters[CALLS].add(1, of | {"outcome": _outcome(failed)})
        self._seconds[CALL_SECONDS].record(seconds, of)
        self._counters[SENT].add(sent)
        self._counters[RECEIVED].add(received)
        if not self._trace.get_current_span().is_recording():
            return  # a request of no run: a trace of its own would say nothing
        began = time.time_ns() - round(seconds * 1e9)
        span = self._tracer.start_span(
            call, start_time=began, attributes={"persist.sent_bytes": sent, "persist.received_bytes": received}
        )
        if failed and (error := sys.exception()) is not None:
            self._failed(span, error)
        span.end()

    def requested(self, kind: str, count: int, dollars: float) -> None:
        if count:
            self._counters[REQUESTS].add(count, {"class": kind})
        if dollars:
            self._counters[DOLLARS].add(dollars)

    @contextmanager
    def span(self, kind: str, name: str, attributes: Mapping[str, Any]) -> Iterator[None]:
        own, failed, began = {f"persist.{kind}": name, **attributes}, True, time.perf_counter()
        with self._tracer.start_as_current_span(
            f"{kind} {name}", attributes=own, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield
                failed = False
            except BaseException as error:
                self._failed(span, error)
                raise
            finally:
                histogram = self._seconds.get(f"persist_{kind}_seconds")
                if histogram is not None and not attributes.get("persist.dry_run"):
                    histogram.record(time.perf_counter() - began, {kind: name, "outcome": _outcome(failed)})

    def _failed(self, span: Any, error: BaseException) -> None:
        """Say what kind of error it was. Its message may have anything in it."""
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(self._trace.StatusCode.ERROR, type(error).__name__)


def _outcome(failed: bool) -> str:
    return "failed" if failed else "ok"


def use(tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Send spans and figures of this process to these providers, from now on; None: those of the process.

    Raises InvalidUsage without opentelemetry-api.
    """
    try:
        process.observer = Observer(tracer_provider, meter_provider)
    except ImportError as missing:
        raise InvalidUsage(f"OpenTelemetry is not installed: pip install 'persist-lib[otel]' ({missing})") from missing


def stop() -> None:
    """Send nothing any more."""
    process.observer = None


def look() -> None:
    """Observe the process if a provider of OpenTelemetry has been set up in it. Loads nothing if not."""
    own = ("opentelemetry.trace", "opentelemetry.metrics")  # those do nothing
    if process.observer is None and any(not type(one).__module__.startswith(own) for one in _providers()):
        use()


def _providers() -> Iterator[Any]:
    """The providers of this process, of the parts of OpenTelemetry that are loaded."""
    for kind, name in (("trace", "get_tracer_provider"), ("metrics", "get_meter_provider")):
        if (api := sys.modules.get(f"opentelemetry.{kind}")) is not None:
            yield getattr(api, name)()


def configure(environ: Mapping[str, str]) -> None:
    """Set OpenTelemetry up as PERSIST_TELEMETRY says: not at all (empty), or `otlp`, by OTLP over HTTP.

    Where to and how is said by OpenTelemetry's own variables, as OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_SERVICE_NAME.
    Where the process has providers already, these are used. Raises InvalidUsage for another word.
    """
    wanted = environ.get(VARIABLE, "")
    if wanted not in ("", "otlp"):
        raise InvalidUsage(f"{VARIABLE} must be otlp, or empty for nothing: got {shown(wanted)}")
    look()
    if not wanted or process.observer is not None:
        return
    try:
        from opentelemetry import metrics, trace  # noqa: PLC0415 - an extra, loaded where it is asked for
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # noqa: PLC0415
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
        from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: PLC0415
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as missing:
        raise InvalidUsage(f"{VARIABLE}=otlp needs persist-lib[otel]: {missing}") from missing
    resource = Resource.create({} if "OTEL_SERVICE_NAME" in environ else {"service.name": "persist"})
    tracers = TracerProvider(resource=resource)
    tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(tracers)
    metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource=resource))
    use()


def flush() -> None:
    """Send what is not sent yet, for some seconds at most: of a process that ends without its exit functions."""
    if process.observer is None:
        return
    for provider in _providers():
        if (sends := getattr(provider, "force_flush", None)) is not None:
            sends(round(FLUSH_S * 1000))


def span(kind: str, name: str, **attributes: Any) -> AbstractContextManager[None]:
    """A block as a span: a `run`, a `shard`, a `duty`. Does nothing in a process that is not observed."""
    if process.observer is None:
        return nullcontext()
    return process.observer.span(kind, name, {f"persist.{key}": value for key, value in attributes.items()})


def logs_json(environ: Mapping[str, str]) -> bool:
    """Whether PERSIST_LOG asks for lines of JSON. Raises InvalidUsage for another word than `json`, or none."""
    if (wanted := environ.get(LOG, "")) not in ("", "json"):
        raise InvalidUsage(f"{LOG} must be json, or empty for lines to read: got {shown(wanted)}")
    return bool(wanted)


def log_line(event: str, at_s: float, **fields: Any) -> str:
    """A line of a log as JSON: when, what kind of event, and what has a value. `at_s` is in seconds since the epoch."""
    kept = {name: value for name, value in fields.items() if value != ""}
    time_ = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": time_, "event": event, **kept}, default=str)


class JsonFormatter(logging.Formatter):
    """Formats what a library logs as such lines, whose event is `log`."""

    def format(self, record: logging.LogRecord) -> str:
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        fields = {"level": record.levelname, "logger": record.name, "says": record.getMessage(), "trace": trace}
        return log_line("log", record.created, **fields)


def duty(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate what carries a duty out on a machine, its first argument: a span, and a figure of its seconds."""

    def decorate(call: Callable[P, T]) -> Callable[P, T]:
        @wraps(call)
        def observed(*args: P.args, **kwargs: P.kwargs) -> T:
            if process.observer is None:
                return call(*args, **kwargs)
            machine: Any = args[0]
            with span("duty", name, shard=machine.shard, dry_run=bool(kwargs.get("dry_run", False))):
                return call(*args, **kwargs)

        return observed

    return decorate


class Counted(Protocol):
    """A client."""

    def metrics(self) -> Any: ...


def collector(client: Counted) -> Any:
    """Return a collector for a registry of prometheus_client: what `client` asked of its location, as of each look.

    Keep no more than one of a client in a registry. It costs nothing between two looks.
    """
    from prometheus_client.registry import Collector  # noqa: PLC0415 - an extra

    class Location(Collector):
        def collect(self) -> Iterator[Any]:
            return _families(client.metrics())

    return Location()


def _families(metrics: Any) -> Iterator[Any]:
    """The figures of a client's `metrics()`, by the names and in the buckets that OpenTelemetry gets."""
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily  # noqa: PLC0415 - an extra

    calls = CounterMetricFamily(CALLS, ABOUT[CALLS], labels=["call", "outcome"])
    seconds = HistogramMetricFamily(CALL_SECONDS, ABOUT[CALL_SECONDS], labels=["call"])
    for name, count in metrics.operations.items():
        calls.add_metric([name, "ok"], count.calls - count.failures)
        calls.add_metric([name, "failed"], count.failures)
        below = [(f"{2**exponent / 1e6:.6g}", sum(count.latencies[: exponent + 1])) for exponent in EXPONENTS]
        seconds.add_metric([name], [*below, ("+Inf", count.calls)], count.seconds)
    yield from (calls, seconds)
    for name, value in (
        (SENT, sum(count.sent_bytes for count in metrics.operations.values())),
        (RECEIVED, sum(count.received_bytes for count in metrics.operations.values())),
        (DOLLARS, metrics.cost.dollars),
    ):
        yield CounterMetricFamily(name, ABOUT[name], value=value)
    requests = CounterMetricFamily(REQUESTS, ABOUT[REQUESTS], labels=["class"])
    for kind in ("gets", "puts", "lists", "deletes", "commits", "queries"):
        requests.add_metric([kind], getattr(metrics.cost, kind))
    yield requests
