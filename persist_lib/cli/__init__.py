"""The `persist` command: look at shards, read and append, and keep them small, without Dagster or Spark.

`render` holds the tables, so that other programs can print them too. `persist --help` and completion in a shell have to
be quick. So modules here import what loads Arrow (the client, the core, schemas) only inside functions, which saves a
second.
"""

from __future__ import annotations


def main() -> None:
    """Run the `persist` command, and exit with its status."""
    import sys

    from persist_lib.cli import standard_streams

    def program() -> None:
        from persist_lib.cli.app import app  # programs that import only `render` do not need typer

        app(prog_name="persist")

    sys.exit(standard_streams.run(program))
