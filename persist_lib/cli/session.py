"""One run of the command: where the location is, how to print, and how failures end.

Standard output carries the answer (tables or JSON). Standard error carries progress, logs and failures.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from persist_lib.arguments import did_you_mean
from persist_lib.cli import json_values, standard_streams
from persist_lib.cli.table_layout import WIDE, Fitted, Flow, fitting
from persist_lib.errors import InvalidUsage, NotFound, PersistError
from persist_lib.runtime.each import Each
from persist_lib.settings import Settings
from persist_lib.telemetry import JsonFormatter, log_line

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.catalog import Controller
    from persist_lib.client import Client
    from persist_lib.location import Location
    from persist_lib.sources import Sources
    from persist_lib.timeline import Tables

T = TypeVar("T")
DEFAULT_LOCATION = "file:./data"

Advance = Callable[[int, int], None]
"""Called with the number of items that are done and the total number."""


@dataclass(frozen=True, slots=True)
class Session:
    """The options that all commands share, and the printing and opening that depend on them."""

    settings: Settings = field(default_factory=Settings)
    as_json: bool = False
    verbose: int = 0
    logs_json: bool = False
    """Whether what is said on standard error is lines of JSON."""
    out: Console = field(default_factory=lambda: console(sys.stdout))
    err: Console = field(default_factory=lambda: console(sys.stderr))

    @property
    def location(self) -> str:
        """The URL of the location."""
        return self.settings.text("location") or DEFAULT_LOCATION

    @property
    def consensus(self) -> str | None:
        """The URL of Consensus, if it is elsewhere."""
        return self.settings.text("consensus")

    def open(
        self, *, read_only: bool = True, create: bool = False, remembers: bool = False, maintains: bool = False
    ) -> Client:
        """Open a client for this location. Raises NotFound if there is no location, unless `create`.

        With `remembers`, a client that only reads may store what a scrub remembers. With `maintains`, leases are short.
        """
        from persist_lib.client import open as open_client
        from persist_lib.config import Config
        from persist_lib.core.cost import parse_prices
        from persist_lib.core.duties import MAINTENANCE_LEASE_MS

        leases = {"lease_ms": MAINTENANCE_LEASE_MS} if maintains else {}
        config = Config.model_validate(leases | self.settings.config_values())
        prices = None
        if given := self.settings.prices:
            try:
                prices = parse_prices(given.value)
            except InvalidUsage as error:
                raise InvalidUsage(f"{given.source}: {error.message}", **error.fields) from error

        try:
            if remembers:
                location = open_remembering(self.location, self.consensus)
                return open_client(location, prices=prices, config=config)
            return open_client(
                self.location, self.consensus, config=config, prices=prices, read_only=read_only, create=create
            )
        except NotFound as error:
            raise NotFound(
                f"there is no location at {self.location}{self._told_by()}. Check --location, $PERSIST_LOCATION, "
                "persist.toml, and where you are; `persist create` and `persist append --create` make one",
                url=self.location,
            ) from error

    @contextmanager
    def controller(self, *, read_only: bool = True, create: bool = False) -> Iterator[Controller]:
        """The controller of the location's collections, for the length of a command."""
        with self.open(read_only=read_only, create=create) as client, client.controller() as controller:
            yield controller

    @contextmanager
    def tables(self, *, read_only: bool = True, create: bool = False) -> Iterator[Tables]:
        """The location's tables, for the length of a command."""
        with self.controller(read_only=read_only, create=create) as controller, controller.tables() as tables:
            yield tables

    @contextmanager
    def sources(self, *, read_only: bool = False, create: bool = False) -> Iterator[Sources]:
        """The location's sources, for the length of a command."""
        with (
            self.controller(read_only=read_only, create=create) as controller,
            closing(controller.sources()) as sources,
        ):
            yield sources

    def each(self, names: Iterable[str], do: Callable[[str], T]) -> Each[T]:
        """Call `do` with each name. A failure is printed when it happens, and does not stop the others."""

        def one(name: str) -> T:
            try:
                return do(name)
            except PersistError as raised:
                error = self.at_a_shell(raised)
                self.complain(error, f"{name}: ")
                raise error from None

        return Each[T]().add(names, one, PersistError)

    def exit(self, found: Each[Any], *codes: int) -> None:
        """End the command if something failed, with the gravest of the failures' exit codes and of those given."""
        if code := max([*map(json_values.exit_code, found.failed.values()), *codes], default=0):
            raise typer.Exit(code)

    def confirm(self, name: str, what: str, kind: str, *shown: RenderableType, yes: bool) -> None:
        """Show what an operation that cannot be undone would do, and ask for the name of what it changes.

        With `yes` it does neither. Raises InvalidUsage if the name is not typed, or cannot be asked for.
        """
        if yes:
            return
        self.show(*shown)
        if self.as_json:
            raise InvalidUsage(f"{what} needs a confirmation, and --json cannot ask for one: add --yes")
        self.err.print(f"This cannot be undone. Type the {kind}'s name: ", end="", markup=False, highlight=False)
        if sys.stdin.readline().strip() != name:
            raise InvalidUsage(f"that is not {name!r}; nothing was changed. --yes does not ask")

    def _told_by(self) -> str:
        given = self.settings.location
        return f" (that is what {given.source} says)" if given else ""

    def answer(self, value: json_values.Json, *shown: RenderableType) -> None:
        """Print the answer: `value` with --json, otherwise `shown`."""
        if self.as_json:
            self.out.out(json_values.encode(value), highlight=False)
        else:
            self.show(*shown)

    def show(self, *shown: RenderableType) -> None:
        """Print text, and tables that have rows; does nothing with --json."""
        if self.as_json:
            return
        for renderable in shown:
            if isinstance(renderable, Fitted) and not renderable.rows:
                continue
            self.out.print(fitting(renderable), crop=False, markup=False, highlight=False)

    def note(self, message: str) -> None:
        """Print a remark on standard error; does nothing with --json."""
        if self.logs_json and not self.as_json:
            self.err.out(log_line("says", time.time(), says=message), highlight=False)
        elif not self.as_json:
            self.err.print(Flow(Text(message, "dim")), crop=False)

    def complain(self, error: BaseException, about: str = "") -> None:
        """Print a failure on standard error: a sentence, or an object with --json. With -v a traceback comes first.

        With PERSIST_LOG=json and without --json it is a line of the log, with the traceback in it.
        """
        if self.logs_json and not self.as_json:
            trace = "".join(traceback.format_exception(error)) if self.verbose else ""
            fields = {"shard": about.removesuffix(": "), "error": type(error).__name__, "says": str(error)}
            self.err.out(log_line("failed", time.time(), **fields, trace=trace), highlight=False)
            return
        if self.verbose:
            self.err.out("".join(traceback.format_exception(error)), highlight=False)
        if self.as_json:
            self.err.out(json_values.encode(json_values.error_value(error)), highlight=False)
        else:
            self.err.print(Flow(Text(f"{about}{type(error).__name__}: {error}", "red")), crop=False)

    def _with_owners(self, error: PersistError) -> PersistError:
        from persist_lib.catalog.describe import OF_MINTED
        from persist_lib.sources.kinds import owners_of

        if not (names := list(dict.fromkeys(OF_MINTED.findall(error.message)))):
            return error
        try:
            with self.open() as client:
                owners = owners_of(client)
        except PersistError:  # the catalog may be what is wrong
            return error
        said = [f"{name} is {owner}" for name in names[:MOST_NAMED] if (owner := owners.of(name)) not in error.message]
        if not said:
            return error
        found = type(error)(f"{error.message} ({'; '.join(said)})", **error.fields)
        found.__cause__ = error.__cause__
        return found.with_traceback(error.__traceback__)

    def at_a_shell(self, error: PersistError) -> PersistError:
        """The error as a user at a shell needs it.

        If it says that a shard, collection or table does not exist, similar names are added, and what commands help.
        Where it names shards with minted names, whose they are is added.
        """
        if not isinstance(error, NotFound):
            return self._with_owners(error)
        shard, collection = error.fields.get("shard"), error.fields.get("collection")
        try:
            with self.open() as client, client.controller() as controller:
                if isinstance(collection, str) and "rendition" not in error.fields:
                    if collection not in controller.list() and collection in client.tables():
                        return _lone(error, collection)
                    return _nothing(error, "collection", collection, controller.list(), self.location)
                if isinstance(table := error.fields.get("table"), str):
                    return _nothing(error, "table", table, client.tables(), self.location)
                if not isinstance(shard, str):
                    return error
                names, others = client.shards(), controller.list()
        except PersistError:
            return error
        if shard in names:  # created since
            return error
        if shard in others:
            said = f"{shard!r} is a collection in {self.location}, not a shard: `persist describe {shard}`"
            return NotFound(said, shard=shard).with_traceback(error.__traceback__)
        meant = did_you_mean(shard, names)
        lists = "`persist shard list --names` lists all" if names else "There are no other shards either"
        makes = "`persist create` and `persist append --create` make one"
        said = f"there is no shard {shard!r} in {self.location}. {meant}{lists}; {makes}"
        return NotFound(said, shard=shard).with_traceback(error.__traceback__)

    @contextmanager
    def progress(self, what: str) -> Iterator[Advance]:
        """Show a progress bar on standard error; none with --json or without a terminal."""
        if self.as_json or not self.err.is_terminal:
            yield lambda _done, _total: None
            return
        from rich.progress import Progress  # loaded only when a bar is shown

        with Progress(console=self.err, transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


MOST_NAMED = 3
"""Shards of which an error says whose they are."""
MAKES = {
    "collection": "`persist create --shards` makes one",
    "table": "`persist create`, and `persist append --create`, make one",
}


def _lone(error: NotFound, name: str) -> PersistError:
    """The error that a table is neither on a collection nor on a timeline."""
    said = (
        f"table {name!r} is on one shard, and not on a collection or a timeline. `persist promote {name}` makes it a "
        "collection, and with --timeline it joins a timeline, for transactions over several tables"
    )
    return NotFound(said, collection=name).with_traceback(error.__traceback__)


def _nothing(error: NotFound, kind: str, name: str, names: list[str], location: str) -> PersistError:
    """The error that there is no collection or table of this name, with those that are near."""
    if name in names:  # created since, or it is not what is missing
        return error
    lists = "`persist tables` lists all" if names else f"There are no other {kind}s either"
    said = f"there is no {kind} {name!r} in {location}. {did_you_mean(name, names)}{lists}; {MAKES[kind]}"
    return NotFound(said, **{kind: name}).with_traceback(error.__traceback__)


def open_remembering(url: str, consensus: str | None) -> Location:
    """Open a location whose Consensus only reads, and whose Blob also writes.

    So a user who may only read the location can scrub it; then nothing is remembered.
    """
    from persist_lib.location.contract import machine_clock
    from persist_lib.location.open import open_location, scheme_of
    from persist_lib.location.scheme import Opening
    from persist_lib.runtime.ambient import Runtime

    location = open_location(url, consensus, read_only=True)
    opener = scheme_of(location.url).blob
    try:
        blob = opener(location.url, Opening(False, False, machine_clock, Runtime())) if opener else location.blob
    except PersistError:
        return location
    except BaseException:
        location.close()
        raise
    location.blob.close()
    return replace(location, blob=blob)


class _Console(Console):
    """A console that raises BrokenPipeError when the reader of a pipe closes it. Rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(stream: TextIO) -> Console:
    """A console on a stream: as wide as the terminal, or too wide to wrap anything."""
    is_wide = not stream.isatty() and "COLUMNS" not in os.environ
    return _Console(file=stream, width=WIDE if is_wide else None, emoji=False)


@contextmanager
def failures(session: Session) -> Iterator[None]:
    """Turn what the library raises on purpose into a sentence and an exit code."""
    try:
        yield
    except PersistError as error:
        session.complain(session.at_a_shell(error))
        raise typer.Exit(json_values.exit_code(error)) from error
    except BrokenPipeError as error:
        # The reader of our output closed the pipe. Standard output is replaced, so that closing it does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from error
    except OSError as error:
        session.complain(standard_streams.told(error))
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        session.note("\n".join(["interrupted", *getattr(error, "__notes__", ())]))
        raise typer.Exit(130) from error


def log_to_stderr(verbose: int, *, as_json: bool = False) -> None:
    """Show the library's log: -v what it does, -vv everything. As lines of JSON, what it warns of in any case."""
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    if as_json:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter())
        logging.basicConfig(level=level, handlers=[handler])
    elif verbose:
        logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
