"""`persist simulate`: a table's columns, settings and policy under seeded schedules and faults, in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
import typer
from rich.console import RenderableType
from rich.text import Text

from persist_lib.cli import shared_options as opt
from persist_lib.cli.json_values import jsonable
from persist_lib.cli.render import labelled, plain_table
from persist_lib.cli.schema_commands import Declared
from persist_lib.cli.session import Session
from persist_lib.cli.table_commands import Carried
from persist_lib.cli.table_layout import Flow
from persist_lib.core import units
from persist_lib.errors import InvalidUsage

if TYPE_CHECKING:  # so that `persist --help` does not load Arrow
    from persist_lib.simulate import Simulated
    from persist_lib.simulate.scene import Scene

SEEDS = 10
_COUNT = {"min": 0, "max": 64, "metavar": "N"}


class Carrying(NamedTuple):
    """What carries a declared table: one shard, unless one of these is given."""

    shards: opt.ShardCount = None
    mode: Annotated[
        Literal["append", "compare_and_append", "yolo", "wal"] | None,
        typer.Option(help="As of `persist create`: append or compare_and_append (a collection), yolo or wal."),
    ] = None


class Tried(NamedTuple):
    """How much is tried, and what goes wrong."""

    seeds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=f"How many seeds. Default: {SEEDS}; one with --seed.")
    ] = None
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="SEED", help="The first seed. Default: 0. The same seed is the same.")
    ] = None
    steps: Annotated[
        int, typer.Option(min=100, metavar="N", help="Steps of the scheduler until the faults of a seed end.")
    ] = 3000
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Begin no other seed after so many seconds. Default: no bound.")
    ] = None
    faults: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help='Chances of faults, as in \'{"crash": 0.01, "full_disk": 0}\', or none for no faults.'
        ),
    ] = None
    writers: Annotated[int, typer.Option(**_COUNT, help="Processes that write.")] = 2
    readers: Annotated[int, typer.Option(**_COUNT, help="Processes that read and listen.")] = 2
    maintainers: Annotated[int, typer.Option(**_COUNT, help="Processes that do upkeep.")] = 2


class Running(NamedTuple):
    """By which policy it runs, for how long, and what it prints."""

    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Fields of a rule, as for `persist report --policy`.")
    ] = None
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Also after a seed that failed.")] = False
    replay: Annotated[bool, typer.Option("--replay", help="Print the whole history of the one --seed.")] = False


def simulate(
    session: Session,
    declared: Declared,
    carrying: Carrying,
    tried: Tried,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A table, whose columns are taken.", autocompletion=opt.names_of_tables),
    ] = None,
    times: opt.Clock = None,
    running: Running = Running(),  # noqa: B008 - it cannot be changed
) -> None:
    """Try a table's columns, settings and policy under faults: real clients in memory, as seeds decide it.

    Each seed makes a location in memory, rows of these columns, and processes that write, read and do upkeep, one
    operation at a time, in an order that the seed draws. Answers of Consensus and Blob are lost or late, processes
    crash and pause for longer than their leases, clocks step, disks are full. All reads are compared with each other
    and with what was acknowledged, and at the end all that is stored is verified and has to come to rest. The same seed
    gives the same history.

    The columns are those of a table of the location, of which nothing else is read and nothing changed, or are
    declared, as for `persist create`. Settings that are given count (--config, persist.toml); others are small, so
    that few rows make many parts: leases of 10 s, parts of 64 KiB. Half of the seeds compact by the policy, half at
    every chance.

    It says what was tried and how often what must hold was checked. Where something does not hold the exit code is 1,
    and it says the seed and the end of its history. Ctrl-C ends it with what was done so far.

    \b
    persist simulate orders --seeds 100
    persist simulate --key id:int64 --value 'lines:list<string>' --mode wal --seconds 60
    persist simulate orders --seed 17 --replay
    persist simulate --key id:int64 --faults '{"pause": 0.05}' --json | jq '.faults'
    """
    from persist_lib import simulate as simulation
    from persist_lib.simulate.scheduler import KEPT_LINES

    policy, keep_going, replay = running
    if replay and tried.seed is None:
        raise InvalidUsage("--replay prints the history of one seed: name it, as in --seed 17 --replay")
    scene = _scene(session, name, declared, carrying, times, policy, tried)
    first, lines = tried.seed or 0, None if replay else KEPT_LINES
    count = 1 if replay else tried.seeds or (SEEDS if tried.seed is None else 1)
    with session.progress("simulate") as advance:
        found = simulation.simulate(
            lambda seed: scene.story(seed, lines), range(first, first + count), seconds=tried.seconds,
            most_failures=count if keep_going else 1, progress=lambda done: advance(done, count), keep_all=replay,
        )  # fmt: skip
    session.answer(_value(found, first), *_shown(found, first, is_whole=replay))
    if found.is_interrupted:
        raise typer.Exit(130)
    if found.failed:
        raise typer.Exit(1)


def _scene(
    session: Session, name: str | None, declared: Declared, carrying: Carrying, times: Any, policy: Path | None,
    tried: Tried,
) -> Scene:  # fmt: skip
    """What is simulated. Raises InvalidUsage where columns are named twice, or not at all."""
    from persist_lib.report.simulated import policy_of_rule
    from persist_lib.simulate import EAGER
    from persist_lib.simulate.scene import Scene, parse_faults, scene_of
    from persist_lib.simulate.table_story import Layout

    if name is not None:
        if any([*declared, *carrying, times]):
            raise InvalidUsage("a table has its columns and what carries it already: name it, or declare them")
        with session.open() as client:
            scene = scene_of(client, name)
    else:
        kind: Any = Carried(shards=carrying.shards, mode=carrying.mode).kind(times)
        layout = Layout(kind, carrying.mode, carrying.shards or 1)
        scene = Scene(declared.schema(opt.parse_clock(times)), layout)
    if policy is not None:
        try:
            given = policy.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidUsage(f"{policy} cannot be read: {error}", path=str(policy)) from error
        scene = msgspec.structs.replace(scene, policy=policy_of_rule(scene.policy or EAGER, given, policy.stem))
    faults = scene.faults if tried.faults is None else parse_faults(tried.faults)
    return msgspec.structs.replace(
        scene, config=session.settings.config_values(), faults=faults, steps=tried.steps, writers=tried.writers,
        readers=tried.readers, maintainers=tried.maintainers,
    )  # fmt: skip


def _value(found: Simulated, first: int) -> dict[str, Any]:
    return {
        "held": not found.failed, "first_seed": first, "asked": found.asked, "stopped": found.stopped,
        **{name: value for name, value in jsonable(found.took).items() if name != "held"},
        "checks": jsonable(found.took.held), "failed": jsonable(found.failed),
    }  # fmt: skip


def _shown(found: Simulated, first: int, *, is_whole: bool) -> list[RenderableType]:
    took = found.took
    last = f" ({first} to {first + took.seeds - 1})" if took.seeds > 1 else f" ({first})" if took.seeds else ""
    left = f" of {found.asked}, {found.stopped}" if found.stopped else ""
    tried = labelled(
        ("seeds", f"{took.seeds}{last}{left}; {took.steps:,} steps, {took.seconds:,.0f} simulated seconds"),
        ("operations", _counts(took.operations)), ("appends", _counts(took.appends)), ("also done", _counts(took.did)),
        ("faults", _counts(took.faults) or "not any"), ("replaced", units.of(took.crashes, "process")),
    )  # fmt: skip
    held = plain_table("what must hold", "times checked", right=["times checked"])
    for what, count in sorted(took.held.items()):
        held.add_row(what, f"{count:,}")
    shown: list[RenderableType] = [*found.history] if is_whole else []
    shown += [tried, held]
    for one in found.failed:
        shown.append(Flow(Text(f"seed {one.seed}: {one.error}: {one.says}", "red"), hang=10))
        if not is_whole:
            shown += [*one.history, f"replay it by the same command with --seed {one.seed} --replay"]
    verdict = f"{units.of(len(found.failed), 'seed')} failed" if found.failed else "all of it held"
    return [*shown, verdict if took.seeds else "no seed ran to its end; what was checked until then held"]


def _counts(counts: Any) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in sorted(counts.items()) if count)
