"""How a function becomes a command: it takes a `Session` first, and gets the options that all commands share."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from io import TextIOWrapper
from typing import Annotated, Any, Concatenate, NamedTuple, ParamSpec

import typer

from persist_lib.cli.session import DEFAULT_LOCATION, Session, failures, log_to_stderr
from persist_lib.settings import PLACES, empty, resolve

P = ParamSpec("P")

_PANEL = "Where and how (also before the command)"
Location = Annotated[
    str | None,
    typer.Option(
        help=f"URL of the location, as in file:./data or s3://bucket/prefix. Default: $PERSIST_LOCATION, "
        f"persist.toml, or {DEFAULT_LOCATION}.",
        metavar="URL",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
Consensus = Annotated[
    str | None,
    typer.Option(
        help="URL of the Consensus, if it is not at the location. Default: $PERSIST_CONSENSUS, persist.toml, "
        "or the location.",
        metavar="URL",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object instead, for machines; failures too.", rich_help_panel=_PANEL),
]
Prices = Annotated[
    str | None,
    typer.Option(
        help='What requests cost: s3 (its list prices), free, or JSON, as in \'{"get": 5e-7, "egress_gib": 0.09}\' for '
        "what differs from S3's. Default: $PERSIST_PRICES, persist.toml, or s3 on S3 and free elsewhere.",
        metavar="PRICES",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        help="Fields of persist.Config as JSON, as in '{\"part_bytes\": 67108864}'. Each counts over the same one in "
        "$PERSIST_CONFIG, and that over the one in persist.toml. `persist config` lists them.",
        metavar="JSON",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
Verbose = Annotated[
    int,
    typer.Option(
        "-v",
        "--verbose",
        count=True,
        help="Log what is done (-vv: everything), and show tracebacks.",
        rich_help_panel=_PANEL,
        show_default=False,
        metavar="",
    ),
]


class Shared(NamedTuple):
    """The shared options as they were given before the command."""

    location: str | None = None
    consensus: str | None = None
    json_: bool = False
    verbose: int = 0
    prices: str | None = None
    config: str | None = None


_SHARED: list[tuple[str, object, object]] = [
    ("location", Location, None),
    ("consensus", Consensus, None),
    ("json_", AsJson, False),
    ("verbose", Verbose, 0),
    ("prices", Prices, None),
    ("config", Config, None),
]


def command(
    app: typer.Typer, name: str, run: Callable[Concatenate[Session, P], None], panel: str | None = None
) -> None:
    """Register `run(session, …)` as the command `name`. Its docstring is the help."""

    def carry_out(ctx: typer.Context, **arguments: Any) -> None:
        own = Shared(*(arguments.pop(option) for option, _, _ in _SHARED))
        before = ctx.find_object(Shared) or Shared()
        session = open_session(own, before)
        with failures(session):
            session = placed(session, own, before)
        with failures(session):  # it looks up near names at the location
            run(session, **arguments)  # type: ignore[call-arg] # `_signature` declares exactly these arguments

    signature = _signature(run)
    carry_out.__signature__ = signature  # type: ignore[attr-defined]
    carry_out.__annotations__ = {each.name: each.annotation for each in signature.parameters.values()}
    app.command(name, help=prose(run.__doc__ or ""), rich_help_panel=panel)(carry_out)


def prose(docstring: str) -> str:
    """Turn a docstring into help text. Lines of a paragraph are joined, unless it starts with a backspace."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(each if each.startswith("\b") else each.replace("\n", " ") for each in paragraphs)


def open_session(own: Shared, before: Shared) -> Session:
    """Set up printing and logging by the options of the command and those before it."""
    verbose = own.verbose + before.verbose
    log_to_stderr(verbose)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # names and values may hold characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    return Session(as_json=own.json_ or before.json_, verbose=verbose)


def placed(session: Session, own: Shared, before: Shared) -> Session:
    """Set location, Consensus, prices and settings.

    The command's options count over those before it, these over the environment, and that over `persist.toml`. Raises
    InvalidUsage for an empty value: an unset variable of a script looks like that.
    """
    options = {name: _given(name, own, before) for name in (*PLACES, "config")}
    return replace(session, settings=resolve(options, os.environ))


def _given(name: str, *options: Shared) -> str | None:
    given = [value for one in options if (value := getattr(one, name)) is not None]
    if not all(value.strip() for value in given):
        raise empty(f"--{name}")
    return given[0] if given else None


def _signature(run: Callable[..., None]) -> inspect.Signature:
    """The command's own parameters without the session, the context, and the shared options."""
    _, *own = inspect.signature(run, eval_str=True).parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    shared = [inspect.Parameter(name, kind, default=default, annotation=hint) for name, hint, default in _SHARED]
    return inspect.Signature([context, *(each.replace(kind=kind) for each in own), *shared])
