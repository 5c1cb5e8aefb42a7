"""How a function becomes a command: it takes a `Session` first, and gets the options that all commands share."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import TextIOWrapper
from typing import Annotated, Any, Concatenate, NamedTuple, ParamSpec, get_type_hints

import typer

from persist_lib.cli.session import DEFAULT_LOCATION, Session, failures, log_to_stderr
from persist_lib.settings import PLACES, empty, resolve
from persist_lib.telemetry import LOG, configure, logs_json, span

P = ParamSpec("P")


def _option(*names: str, help: str, **more: Any) -> Any:  # noqa: A002 - as Typer calls it
    return typer.Option(*names, help=help, rich_help_panel="Where and how (also before the command)", **more)


Location = Annotated[
    str | None,
    _option(
        help=f"URL of the location, as in file:./data or s3://bucket/prefix. Default: $PERSIST_LOCATION, "
        f"persist.toml, or {DEFAULT_LOCATION}.",
        metavar="URL", show_default=False,
    ),
]  # fmt: skip
Consensus = Annotated[
    str | None,
    _option(
        help="URL of the Consensus, if it is not at the location. Default: $PERSIST_CONSENSUS, persist.toml, "
        "or the location.",
        metavar="URL", show_default=False,
    ),
]  # fmt: skip
AsJson = Annotated[bool, _option("--json", help="Print one JSON object instead, for machines; failures too.")]
Prices = Annotated[
    str | None,
    _option(
        help='What requests cost: s3 (its list prices), free, or JSON, as in \'{"get": 5e-7, "egress_gib": 0.09}\' for '
        "what differs from S3's. Default: $PERSIST_PRICES, persist.toml, or s3 on S3 and free elsewhere.",
        metavar="PRICES",
    ),
]  # fmt: skip
Config = Annotated[
    str | None,
    _option(
        help="Fields of persist.Config as JSON, as in '{\"part_bytes\": 67108864}'. Each counts over the same one in "
        "$PERSIST_CONFIG, and that over the one in persist.toml. `persist config` lists them.",
        metavar="JSON",
    ),
]  # fmt: skip
_LOG = "Log what is done (-vv: everything), and show tracebacks."
Verbose = Annotated[int, _option("-v", "--verbose", count=True, help=_LOG, show_default=False, metavar="")]


class Shared(NamedTuple):
    """The options that all commands have. They may also be given before the command."""

    location: Location = None
    consensus: Consensus = None
    json_: AsJson = False
    verbose: Verbose = 0
    prices: Prices = None
    config: Config = None


def command(
    app: typer.Typer, name: str, run: Callable[Concatenate[Session, P], None], panel: str | None = None
) -> None:
    """Register `run(session, …)` as the command `name`. Its docstring is the help."""

    _, *parameters = inspect.signature(run, eval_str=True).parameters.values()
    shared = inspect.Parameter("shared", inspect.Parameter.KEYWORD_ONLY, annotation=Shared)
    options, gathered = grouped([*parameters, shared])

    def carry_out(ctx: typer.Context, **given: Any) -> None:
        arguments = gathered(given)
        own, before = arguments.pop("shared"), ctx.find_object(Shared) or Shared()
        session = open_session(own, before)
        with failures(session):
            session = placed(session, own, before)
        with failures(session), span("run", name):  # it looks up near names at the location
            run(session, **arguments)  # type: ignore[call-arg] # `grouped` declares exactly these arguments

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    declare(carry_out, [context, *options])
    app.command(name, help=prose(run.__doc__ or ""), rich_help_panel=panel)(carry_out)


def grouped(
    parameters: Sequence[inspect.Parameter],
) -> tuple[list[inspect.Parameter], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Options for parameters, where one whose type is a NamedTuple stands for an option for each of its fields.

    Also a function that makes the arguments of the options that were given.
    """
    groups: dict[str, Any] = {one.name: one.annotation for one in parameters if hasattr(one.annotation, "_fields")}
    options: list[inspect.Parameter] = []
    for one in parameters:
        if one.name in groups:
            group = groups[one.name]
            options += [
                one.replace(name=name, default=group._field_defaults.get(name, one.empty), annotation=hint)
                for name, hint in get_type_hints(group, include_extras=True).items()
            ]
        else:
            options.append(one)
    found = [one.replace(kind=one.KEYWORD_ONLY) for one in options]

    def gathered(given: dict[str, Any]) -> dict[str, Any]:
        of_groups = {
            name: group(**{field: given.pop(field) for field in group._fields if field in given})
            for name, group in groups.items()
        }
        return given | of_groups

    return found, gathered


def declare(run: Callable[..., None], parameters: Sequence[inspect.Parameter]) -> None:
    """Let Typer see these parameters."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}


def prose(docstring: str) -> str:
    """Turn a docstring into help text. Lines of a paragraph are joined, unless it starts with a backspace."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(each if each.startswith("\b") else each.replace("\n", " ") for each in paragraphs)


def open_session(own: Shared, before: Shared) -> Session:
    """Set up printing and logging by the options of the command and those before it."""
    verbose = own.verbose + before.verbose
    is_json = os.environ.get(LOG) == "json"
    log_to_stderr(verbose, as_json=is_json)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # names and values may hold characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    return Session(as_json=own.json_ or before.json_, verbose=verbose, logs_json=is_json)


def placed(session: Session, own: Shared, before: Shared) -> Session:
    """Set location, Consensus, prices and settings.

    The command's options count over those before it, these over the environment, and that over `persist.toml`. Raises
    InvalidUsage for an empty value: an unset variable of a script looks like that.
    """
    options = {name: _given(name, own, before) for name in (*PLACES, "config")}
    configure(os.environ)
    logs_json(os.environ)
    return replace(session, settings=resolve(options, os.environ))


def _given(name: str, *options: Shared) -> str | None:
    given = [value for one in options if (value := getattr(one, name)) is not None]
    if not all(value.strip() for value in given):
        raise empty(f"--{name}")
    return given[0] if given else None
