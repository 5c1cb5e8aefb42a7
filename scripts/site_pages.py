"""A hook of MkDocs: the pages of the site that come from the code, and the list of design notes.

The reference of the API is made of docstrings, that of the command of what `--help` prints.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
GROUPS = {
    "client": (
        "Client", "Opening a location, and what a client does.", ["open", "Client", "Config", "CacheConfig", "Runtime"],
    ),
    "table": ("Tables", "One handle, whatever carries the rows.", ["Table", "TableDescription", "Done", "old"]),
    "schema": ("Schemas and updates", "What rows and changes look like.", ["Schema", "Update", "decode_rows"]),
    "write": (
        "Writing", "Appends, and what they answer.",
        ["WriteHandle", "Appended", "Changed", "Restored", "Append", "Batching", "Verdict"],
    ),
    "read": (
        "Reading", "Snapshots, and following a shard.",
        ["ReadHandle", "Snapshot", "Changes", "Split", "Listen", "Updates", "Progress"],
    ),
    "times": ("Times", "Frontiers: how far something has come.", ["Antichain", "at", "TOP"]),
    "upkeep": (
        "Upkeep and cost", "What maintenance finds and does, and what it costs.",
        ["Survey", "Look", "Policy", "Cost", "Prices", "Metrics", "Spending"],
    ),
}  # fmt: skip
"""The pages of the API: a title, a sentence, and public names. Errors have a page of their own, made of the base."""


def public_names() -> list[str]:
    """The names that `import persist_lib` offers. They are read from the source, so that nothing has to be loaded."""
    source = (ROOT / "persist_lib" / "public.py").read_text()
    return re.findall(r'^    "(\w+)",$', source.partition("__all__")[2], re.MULTILINE) + error_names()


def error_names() -> list[str]:
    """The exceptions, in the order of their module."""
    return re.findall(r"^class (\w+)\(", (ROOT / "persist_lib" / "errors.py").read_text(), re.MULTILINE)


def api_pages() -> Iterator[tuple[str, str, str]]:
    """Address, title and text of each page of the API. Raises LookupError for a public name that no page has."""
    groups = {**GROUPS, "errors": ("Errors", "Every exception that Persist raises on purpose.", error_names())}
    listed = [name for _, _, names in groups.values() for name in names]
    if wrong := set(listed) ^ set(public_names()):
        raise LookupError(f"GROUPS of {__file__} and persist_lib.public differ in {', '.join(sorted(wrong))}")
    for address, (title, sentence, names) in groups.items():
        entries = "".join(f"::: persist_lib.public.{name}\n\n" for name in names)
        yield (
            f"api/{address}.md",
            title,
            f"# {title}\n\n{sentence} All names are those of `import persist_lib as persist`.\n\n{entries}",
        )


def command_page() -> str:
    """What `--help` of each command prints."""
    with patch.dict(os.environ, COLUMNS="100", NO_COLOR="1", TERM="dumb"):
        # SUBTLE: only here, as MkDocs takes away what a hook adds to the path while it is imported.
        sys.path.insert(0, str(ROOT))
        app = import_module("persist_lib.cli.app").app
        sections = [_section(app, path) for path in _commands(import_module("typer.main").get_command(app))]
    return "# The command\n\nWhat `persist` and each of its commands print with `--help`.\n" + "".join(sections)


def _commands(group: Any, *path: str) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from _commands(command, *path, name)


def _section(app: Any, path: tuple[str, ...]) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        app([*path, "--help"], prog_name="persist", standalone_mode=False)
    shown = "\n".join(line.rstrip() for line in printed.getvalue().strip("\n").splitlines())
    return f"\n## {' '.join(('persist', *path))}\n\n```text\n{shown}\n```\n"


def design_notes() -> dict[str, str]:
    """The file of each design note, by its title."""
    notes = sorted((ROOT / "docs" / "design").glob("*.md"))
    return {note.read_text().partition("\n")[0].removeprefix("# "): note.name for note in notes}


def design_page() -> str:
    """The list of the design notes."""
    entries = "".join(f"- [{title}]({name})\n" for title, name in design_notes().items())
    return f"# Design\n\nWhat was decided, why, what it costs, and what was rejected.\n\n{entries}"


def on_config(config: Any) -> Any:
    """Fill the two lists of the navigation."""
    sections = [pages for entry in config.nav for pages in entry.values() if isinstance(pages, list)]
    for entry in (entry for pages in sections for entry in pages):
        if "Design" in entry:
            notes = [{title: f"design/{name}"} for title, name in design_notes().items()]
            entry["Design"] = ["design/index.md", *notes]
        if "Python" in entry:
            entry["Python"] = [{title: address} for address, title, _ in api_pages()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that come from the code."""
    generated = import_module("mkdocs.structure.files").File.generated  # MkDocs is only where the site is built
    pages = {address: text for address, _, text in api_pages()}
    for address, text in {**pages, "command.md": command_page(), "design/index.md": design_page()}.items():
        files.append(generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead a link to a folder, which a code host shows as a list of files, to the page with that list."""
    return re.sub(r"\]\((\w+)/\)", r"](\1/index.md)", markdown)
