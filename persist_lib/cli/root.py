"""What `persist --help` shows, the list of all commands, and what is said of earlier spellings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from persist_lib.cli.render import plain_table
from persist_lib.cli.session import Session
from persist_lib.core.duties import DUTIES, LAYER_DUTIES

EVERYDAY = ("tables", "create", "append", "upsert", "read", "changes", "listen", "sql", "restore", "maintain")
"""The commands that people use, in this order. `persist commands` lists all."""
UPKEEP = {duty.name: duty for duty in (*LAYER_DUTIES, *DUTIES) if duty.is_upkeep}
"""The duties that `persist maintain --only` takes, in the order in which they are done."""
RENAMED = {
    **{duty: f"maintain NAME --only {duty}" for duty in UPKEEP if duty not in {"collections", "pending"}},
    **{f"{noun} {verb}": f"{verb} NAME" for noun, verbs in {
        "collection": ("append", "upsert", "delete", "changes", "listen", "drop", "rename", "evolve"),
        "table": ("upsert", "update", "delete", "changes", "listen", "drop"),
    }.items() for verb in verbs},
    **{verb: f"shard {verb} SHARD" for verb in ("show", "log", "scrub", "upgrade", "repair")},
    "snapshot": "read NAME", "collection snapshot": "read NAME", "table read": "read NAME",
    "table insert": "append NAME", "finish": "drop NAME", "collection alter": "set-retention NAME",
    "collection hold": "hold set NAME", "hold downgrade": "hold set NAME HOLD --since T --give-up",
    "hold list": "describe NAME", "shards": "shard list", "census": "shard list --long",
    "watch": "shard list --watch", "diff": "shard log SHARD V1 V2",
    "plan": "maintain NAME --only compaction --dry-run", "producers": "shard producers SHARD",
    "producers list": "shard producers SHARD", "producers forget": "shard producers SHARD --forget PRODUCER",
    "collection list": "tables", "collection show": "describe NAME",
    "collection capabilities": "describe NAME --who", "collection create": "create NAME --shards N",
    "collection tend": "maintain NAME --only collections", "table list": "tables", "table show": "describe NAME",
    "table create": "create NAME --timeline TIMELINE", "table transact": "transact FILE",
    "table outcome": "outcome NAME TOKEN", "source list": "source show",
    "source resume": "source pause NAME --resume", "source check": "health NAME",
    "pending list": "pending show",
    "pending absorb": "maintain NAME --only pending", "streams list": "streams show",
    "streams lock show": "streams show", "streams lock break": "streams unlock", "events kinds": "events show",
    "events head": "events cat STORE --first N", "events tail": "events cat STORE --last N",
    "events repair": "events check STORE --repair", "simulate-policy": "report NAME --policy FILE",
    "holds": "shard list --holders", "explain": "shard show SHARD --why", "publish": "maintain NAME --publish iceberg",
}  # fmt: skip
"""Earlier spellings, and others that people look for, and what each is."""
LONGEST = max(len(words.split()) for words in RENAMED)


class Group(TyperGroup):
    """A group of commands that knows what its commands were called before."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of these words. Of one that was renamed, the error says what it is now."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            given = [*ctx.command_path.split()[1:], *(word for word in args if not word.startswith("-"))]
            said = (" ".join(given[:count]) for count in range(LONGEST, 0, -1))
            words = next((words for words in said if words in RENAMED), None)
            if words is not None and hasattr(error, "message"):
                error.message = f"There is no command 'persist {words}': it is `persist {RENAMED[words]}`."
            raise


class Root(Group):
    """The commands of `persist`. Its help shows those of every day, on one screen."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, without the options that each command's help shows, and without the rarer commands."""
        shown = {name: self.commands[name] for name in EVERYDAY}
        kept = self.commands, self.params, {name: command.rich_help_panel for name, command in shown.items()}  # type: ignore[attr-defined]
        try:
            self.commands, self.params = shown, [one for one in self.params if one.name in {"version", "help"}]
            for command in shown.values():
                command.rich_help_panel = "Every day"  # type: ignore[attr-defined]
            super().format_help(ctx, formatter)
        finally:
            self.commands, self.params = kept[0], kept[1]
            for name, command in shown.items():
                command.rich_help_panel = kept[2][name]  # type: ignore[attr-defined]


def commands(session: Session) -> None:
    """List all commands, one line each.

    \b
    persist commands
    persist commands --json | jq -r '.commands[].command'
    """
    from persist_lib.cli.app import app

    found = list(within(typer.main.get_command(app)))
    shown = plain_table("command", "what it does")
    for words, short in found:
        shown.add_row(f"persist {words}", short.replace("\\[", "["))
    value = [{"command": f"persist {words}", "help": short} for words, short in found]
    session.answer({"commands": value}, shown)


def within(group: Any, *path: str) -> Iterator[tuple[str, str]]:
    """The words of each command of a group, and the first line of its help."""
    for name, found in group.commands.items():
        if hasattr(found, "commands"):
            yield from within(found, *path, name)
        else:
            yield " ".join((*path, name)), (found.help or "").split("\n", 1)[0]
