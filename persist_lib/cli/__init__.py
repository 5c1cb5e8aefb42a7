"""The `persist` command: look at shards, read and append, and keep them small, without Dagster or Spark.

`render` holds the tables, for others to print as well. `persist --help` and completion in a shell have to be quick, so
modules here import what loads Arrow (the client, the core, schemas) inside functions only: that saves a second.
"""

from __future__ import annotations


def main() -> None:
    """The entry point."""
    from persist_lib.cli.app import app  # typer, for which those who import only `render` have no use

    app(prog_name="persist")
