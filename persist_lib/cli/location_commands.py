"""Of a whole location: `persist config` says where it is, `persist health` what is wrong, `persist serve` serves it."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.text import Text

from persist_lib.cli.json_values import jsonable
from persist_lib.cli.session import DEFAULT_LOCATION, Session
from persist_lib.cli.table_layout import Fitted, Flow
from persist_lib.core import units
from persist_lib.errors import InvalidUsage, redacted
from persist_lib.settings import FILE, PLACES

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.health import Problem

DEFAULT = "default"
DEFAULTS = {
    "location": DEFAULT_LOCATION, "consensus": "the location", "prices": "S3's list prices on S3, free elsewhere",
}  # fmt: skip


class Ruling(NamedTuple):
    """What `persist config` does with the location's rules, in place of showing settings."""

    rules: Annotated[
        Path | None, typer.Option("--rules", metavar="FILE", help="Set the location's rules: TOML with [[rule]].")
    ] = None
    show_rules: Annotated[
        bool, typer.Option("--show-rules", help="Print the location's rules, as a file for --rules.")
    ] = False

    def do(self, session: Session) -> None:
        """Set the rules, or print them."""
        if self.rules is None:
            from persist_lib.core.rules import as_toml

            with session.open() as client:
                shown = client.rules()
            session.answer({"rules": jsonable(shown)}, as_toml(shown))
            return
        try:
            text = self.rules.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidUsage(f"{self.rules} cannot be read: {error}") from error
        with session.open(read_only=False) as client:
            found = client.set_rules(text)
        session.answer({"rules": jsonable(found)}, f"{units.of(len(found), 'rule')} in force")


def config(
    session: Session,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A table or a shard: how upkeep looks after it.")
    ] = None,
    ruling: Ruling = Ruling(),  # noqa: B008 - it cannot be changed
) -> None:
    """Show which location, Consensus, prices and settings are in force, and where each came from. Opens nothing.

    An option counts over the environment ($PERSIST_LOCATION, $PERSIST_CONSENSUS, $PERSIST_PRICES, and $PERSIST_CONFIG,
    which is JSON), and the environment counts over persist.toml. This file is looked for in the current folder, then in
    its parents up to the root of the repository (with .git) or to the home folder, whichever comes first; outside of
    both, only in the current folder. Relative paths in it are relative to it. A consensus in it counts only together
    with its location. It needs no passwords; those of PostgreSQL may be in ~/.pgpass, those of S3 where AWS has them.

    \b
    location = "file:./data"                # persist.toml
    prices = "s3"
    \\[config]                                # fields of persist.Config
    part_bytes = 67108864

    \b
    persist config --json | jq '.settings.location'

    Rules say how upkeep looks after tables and shards of some names. They are in the location, so they hold for the
    library, `persist maintain` and Dagster. For each field the most specific pattern counts; a table's own retention
    counts over rules, and rules over settings. A file without rules ends them.

    \b
    \\[\\[rule]]
    pattern = "orders*"
    retention = "7 days"                    # of what has none of its own; or 1000 times, of shards "last 10" appends
    quiet = ["08:00-18:00"]                 # UTC: no duty begins then
    compaction_weight = 0.25                # and _advance and _ahead: as in the settings
    cluster = "made"                        # a column whose filters are to read little: rows lie by its values
    bytes_day = 107374182400                # compaction of them all reads and writes so much a day, and then waits
    dollars_day = 2.5                       # the same of the price of its requests
    order = "coldest"                       # what is compacted first: "newest", "coldest", else most debt
    engine = "spark"                        # of Dagster's runs and jobs: "auto", "spark", "local"
    verify_reads = 0                        # of Dagster's runs: at how many times reads are compared
    still = "1 hour"                        # limits of `persist health` and of Dagster's alerts: how far behind,
    kept = 10737418240                      # how much one reader or hold may keep,
    garbage = 1073741824                    # and how much may wait

    \b
    persist config --rules rules.toml
    persist config --show-rules > rules.toml
    persist config orders                   each value, and where it is from
    """
    if ruling != Ruling():
        if name is not None or (ruling.rules is not None and ruling.show_rules):
            raise InvalidUsage("--rules and --show-rules go alone, and without a name: rules have patterns")
        ruling.do(session)
        return
    rows, found = _rows(session) if name is None else _rows_of(session, name), session.settings.file
    table = Fitted(("setting", "value", "from"))
    for each, value, source in rows:
        table.add_row(each, "none" if value is None else str(value), source, style="dim" if source == DEFAULT else None)
    value = {"file": found and str(found), "settings": {name: {"value": v, "source": s} for name, v, s in rows}}
    session.answer(value, table, f"{FILE}: {found or 'none here'}")


def _rows_of(session: Session, name: str) -> list[tuple[str, Any, str]]:
    """What upkeep goes by for one table or shard, and where each value came from."""
    from persist_lib.core.rules import FIELDS, values_of
    from persist_lib.errors import InvalidName

    given = {one: (value, source) for one, value, source in _rows(session)}
    settings = {field: given[f"config.{field}"] for field in FIELDS if f"config.{field}" in given}
    state = None
    with session.open() as client:
        said = client.rules_of(name)
        spent = {(one.field, one.pattern): one.shown for one in client.budgets()}
        with suppress(InvalidName):
            state = found.state if (found := client.machine(name).try_fetch()) is not None else None
    return [
        (one.field, one.shown if isinstance(one.value, tuple) else one.value,
         one.source + (f"; {one.spent} today" if one.spent else ""))
        for one in values_of(said, state, settings, spent)
    ]  # fmt: skip


def _rows(session: Session) -> list[tuple[str, Any, str]]:
    """Each setting, its value without passwords, and where it came from."""
    from persist_lib.config import Config, usual_where
    from persist_lib.location.open import scheme_of, url_of

    settings = session.settings
    rows: list[tuple[str, Any, str]] = []
    for name in PLACES:
        given = getattr(settings, name)
        rows.append((name, redacted(settings.text(name) or DEFAULTS[name]), given.source if given else DEFAULT))
    config = Config.model_validate(settings.config_values())
    with suppress(InvalidUsage):  # what is no location has the defaults of any
        schemes = [scheme_of(url_of(place)) for place in (session.location, session.consensus or session.location)]
        config = usual_where(config, reads=schemes[0].tells_requests, rows=schemes[1].tells_requests)
    for name, value in config.model_dump().items():
        source = settings.config[name].source if name in settings.config else DEFAULT
        rows.append((f"config.{name}", value, source))
    return rows


class Source(NamedTuple):
    """From when on something is wrong with a source: the fields of `sources.Limits`."""

    instances: Annotated[int, typer.Option(min=0, help="Of a source: how many have to be at work.")] = 1
    behind_s: Annotated[
        int, typer.Option("--behind", min=0, metavar="SECONDS", help="How far a source may be behind.")
    ] = 300
    lag_messages: Annotated[int | None, typer.Option(min=0, help="How many a source may have left.")] = None
    lag_bytes: Annotated[int | None, typer.Option(min=0, help="How many a source may have left.")] = None
    errors: Annotated[int | None, typer.Option(min=0, help="How many bad messages a source may have.")] = None
    errors_share: Annotated[
        float, typer.Option(min=0, max=1, help="How many of the messages of instances at work may be bad.")
    ] = 0.01
    held_back_bytes: Annotated[
        int, typer.Option(min=0, help="How much the upstream may have to keep for a source.")
    ] = 10 << 30


class Place(NamedTuple):
    """The same for all else: the fields of `health.Limits`."""

    overdue_s: Annotated[
        float, typer.Option("--overdue", min=0, metavar="SECONDS", help="For how long upkeep may not have been done.")
    ] = 86_400
    garbage: Annotated[
        int, typer.Option(min=0, metavar="BYTES", help="How much of a table may wait to be deleted, beyond its size.")
    ] = 1 << 30
    holders: Annotated[int, typer.Option(min=0, help="How many readers, writers or holds a shard may have.")] = 1000
    kept: Annotated[
        int | None, typer.Option(min=0, metavar="BYTES", help="How much one reader or hold may keep. Default: any.")
    ] = None
    paused_s: Annotated[
        float, typer.Option("--paused", min=0, metavar="SECONDS", help="For how long a pause may have no end.")
    ] = 7 * 86_400
    slow_s: Annotated[
        float, typer.Option("--slow", min=0, metavar="SECONDS", help="How long a small request may take.")
    ] = 2.0
    seconds: Annotated[float, typer.Option(min=0, help="How long to look at shards that moved.")] = 60.0


def health(
    session: Session,
    of_sources: Source,
    of_places: Place,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Tables, shards and sources. Default: everything.")
    ] = None,
    still: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=SPAN", help="How far the upper of these tables may be behind. Repeat it."),
    ] = None,
) -> None:
    """Say what is wrong: damage, upkeep that is missing, lag, sources, streams, what keeps garbage, slow stores.

    One line a problem, with what helps and the manual's place. It ends with exit code 1 where something is wrong, and
    with 3 where stored data is damaged, for monitors. Changes nothing. Of a source on which no instance is at work, the
    upstream is asked from here; a paused one has no lag to speak of.

    \b
    persist health
    persist health orders --still 'orders=1 hour'
    persist health --behind 60 --errors 0 --json | jq -r '.problems[].do'
    """
    from persist_lib import health, sources

    spans = {}
    for one in still or ():
        pattern, sign, span = one.partition("=")
        if not (pattern and sign and span):
            raise InvalidUsage(f"--still takes PATTERN=SPAN, as in --still 'orders*=1 hour': got {one!r}")
        spans[pattern] = span
    limits = health.Limits(sources=sources.Limits(**of_sources._asdict()), still=spans, **of_places._asdict())
    with session.open() as client:
        found = health.check(client, limits, names or ())
        url = client.url
    looked = ", ".join(units.of(count, what.removesuffix("s")) for what, count in found.looked_at.items() if count)
    wrong = units.of(len(found.problems), "problem") if found.problems else "nothing is wrong"
    value = {
        "location": url, "sound": found.is_sound, "damaged": found.is_damaged, "now": found.now,
        "problems": [{"key": one.key, **jsonable(one)} for one in found.problems], "looked_at": dict(found.looked_at),
        "cost": jsonable(found.cost),
    }  # fmt: skip
    session.answer(value, *map(_told, found.problems), f"looked at {looked} in {url}", wrong)
    if found.problems:
        raise typer.Exit(3 if found.is_damaged else 1)


def _told(problem: Problem) -> Flow:
    style = "red" if problem.is_damage else "yellow"
    about = f"{problem.about} {problem.name}: {problem.says}"
    return Flow(
        Text.assemble((f"{problem.check:<10} ", style), about, f"\n{'':11}{problem.do}   {problem.page}"), hang=11
    )


class Admitted(NamedTuple):
    """Who may use a server, and how it shows who it is."""

    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML: clients, their tokens or hashes, and their rights.")
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The server's certificate chain, in PEM; with --tls-key.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key, in PEM, unencrypted.")] = None
    tls_client_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Authorities (PEM) that clients' certificates must come from.")
    ] = None


def serve(
    session: Session,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 takes a free one.")] = (
        "127.0.0.1:7600"
    ),
    admitted: Admitted = Admitted(),  # noqa: B008 - it cannot be changed
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where /healthz, /readyz and /metrics are, over plain HTTP.")
    ] = None,
    metrics_shards: Annotated[
        int, typer.Option(min=0, max=1000, metavar="N", help="Name the N shards with the most work in /metrics.")
    ] = 0,
    drain: Annotated[
        float, typer.Option(min=0, max=3600, metavar="SECONDS", help="At the end, serve calls for so long.")
    ] = 10.0,
) -> None:
    """Serve the shards of this location to other processes, until Ctrl-C or SIGTERM; a second one ends it at once.

    Clients name it instead of the database: [bold]consensus="persist://host:port"[/]. Their changes of a shard then
    meet here and are committed together, as one row, so that they do not contend. Data never passes through the server.
    It may be killed at any time, and several may serve one location. With --token-file, it serves only clients whose
    token ($PERSIST_TOKEN) it knows, each what its rights allow. Without both that and TLS, it listens on the loopback
    interface only.

    It prints one line when it is ready. With --http, probes and Prometheus get pages without a token: they tell nothing
    of what is in shards, and names of shards only with --metrics-shards. gRPC's health service is on the same port as
    the shards.

    \b
    persist --location s3://bucket/data --consensus postgresql://db/persist serve --listen 127.0.0.1:7600
    persist serve --http 127.0.0.1:7601
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else strangers fill the log: a line for each bad connection
    from persist_lib.location.scheme import with_extra

    ShardServer = with_extra("persist_lib.server.shard_server", "a shard server", "server").ShardServer  # noqa: N806
    _open_more_files()
    with session.open(read_only=False) as client, _told_to_end() as ends:
        server = ShardServer(client, listen, **admitted._asdict(), http=http, named_shards=metrics_shards)
        port = server.start()
        try:
            address = f"{listen.rpartition(':')[0]}:{port}"
            pages = f"{http.rpartition(':')[0]}:{server.http_port}" if http else None
            session.answer(
                {"listening": address, "http": pages},
                f"serving {client.url} on {'persists' if admitted.tls_cert else 'persist'}://{address}"
                f"{f', and http://{pages}' if pages else ''}",
            )
            while not ends.wait(1.0):
                pass
            session.note("stopping")
        finally:
            if not server.stop(drain):
                os._exit(0)  # all are answered, and what waits for the store may wait for long


@contextmanager
def _told_to_end() -> Iterator[threading.Event]:
    """Set at the first SIGTERM or Ctrl-C. The second ends the process at once: a server may be killed at any point."""
    ends = threading.Event()

    def told(number: int, _frame: object) -> None:
        if ends.is_set():
            os._exit(128 + number)
        ends.set()

    former = {number: signal.signal(number, told) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield ends
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _open_more_files() -> None:
    """Each connection is one, and the usual limit of 1024 is meant for programs that have few."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
