"""The `persist` command: look at shards, read and append, and keep them small, without Dagster or Spark.

`render` holds the tables, for others to print as well. Modules here load Arrow inside functions only: `persist --help`
and completion in a shell have to be quick.
"""

from __future__ import annotations


def main() -> None:
    """The entry point."""
    from persist_lib.cli.app import app  # noqa: PLC0415 - who imports `render` only has no use for typer

    app(prog_name="persist")
