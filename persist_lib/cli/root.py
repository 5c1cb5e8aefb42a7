"""What `persist --help` shows, the list of all commands, and what is said of earlier spellings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from persist_lib.cli.render import plain_table
from persist_lib.cli.session import Session

EVERYDAY = ("tables", "create", "append", "upsert", "read", "changes", "listen", "sql", "restore", "maintain")
"""The commands that people use, in this order. `persist commands` lists all."""
RENAMED = {
    "snapshot": "read", "collection snapshot": "read", "table read": "read", "table insert": "append",
    "finish": "drop", "collection alter": "set-retention", "collection hold": "hold",
} | {
    f"{noun} {verb}": verb
    for noun, verbs in {
        "collection": ("append", "upsert", "delete", "changes", "listen", "drop", "rename", "evolve"),
        "table": ("upsert", "update", "delete", "changes", "listen", "drop"),
    }.items()
    for verb in verbs
}  # fmt: skip
"""The earlier spellings, and the command that each is now."""


class Group(TyperGroup):
    """A group of commands that knows what its commands were called before."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of these words. Of one that was renamed, the error says what it is now."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            words = " ".join([*ctx.command_path.split()[1:], *args[:1]])
            if words in RENAMED and hasattr(error, "message"):
                now = f"persist {RENAMED[words]} NAME"
                error.message = f"There is no command 'persist {words}' any more: it is `{now}`."
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

    found = list(_within(typer.main.get_command(app)))
    shown = plain_table("command", "what it does")
    for words, short in found:
        shown.add_row(f"persist {words}", short)
    value = [{"command": f"persist {words}", "help": short} for words, short in found]
    session.answer({"commands": value}, shown)


def _within(group: Any, *path: str) -> Iterator[tuple[str, str]]:
    for name, found in group.commands.items():
        if hasattr(found, "commands"):
            yield from _within(found, *path, name)
        else:
            yield " ".join((*path, name)), (found.help or "").split("\n", 1)[0]
