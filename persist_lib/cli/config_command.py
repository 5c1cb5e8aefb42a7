"""`persist config`: what is in force, and where each value came from."""

from __future__ import annotations

from typing import Any

from persist_lib.cli.session import DEFAULT_LOCATION, Session
from persist_lib.cli.table_layout import Fitted
from persist_lib.errors import redacted
from persist_lib.settings import FILE, PLACES

DEFAULT = "default"
DEFAULTS = {
    "location": DEFAULT_LOCATION, "consensus": "the location", "prices": "S3's list prices on S3, free elsewhere",
}  # fmt: skip


def config(session: Session) -> None:
    """Show which location, Consensus, prices and settings are in force, and where each came from. Opens nothing.

    An option counts over the environment ($PERSIST_LOCATION, $PERSIST_CONSENSUS, $PERSIST_PRICES, and $PERSIST_CONFIG,
    which is JSON), and the environment counts over persist.toml. This file is looked for in the current folder, then in
    its parents up to the root of the repository (with .git) or to the home folder, whichever comes first; outside of
    both, only in the current folder. Relative paths in it are relative to it. A consensus in it counts only together
    with its location. It needs no passwords; those of PostgreSQL may be in ~/.pgpass, those of S3 where AWS has them.

    \b
    location = "file:./data"                # persist.toml
    prices = "s3"
    \\[config]                                # fields of persist.Config
    part_bytes = 67108864

    \b
    persist config
    persist config --json | jq '.settings.location'
    """
    rows = _rows(session)
    found = session.settings.file
    table = Fitted(("setting", "value", "from"))
    for name, value, source in rows:
        table.add_row(name, "none" if value is None else str(value), source, style="dim" if source == DEFAULT else None)
    value = {"file": found and str(found), "settings": {name: {"value": v, "source": s} for name, v, s in rows}}
    session.answer(value, table, f"{FILE}: {found or 'none here'}")


def _rows(session: Session) -> list[tuple[str, Any, str]]:
    """Each setting, its value without passwords, and where it came from."""
    from persist_lib.config import Config

    settings = session.settings
    rows: list[tuple[str, Any, str]] = []
    for name in PLACES:
        given = getattr(settings, name)
        rows.append((name, redacted(settings.text(name) or DEFAULTS[name]), given.source if given else DEFAULT))
    config = Config.model_validate(settings.config_values()).model_dump()
    for name, value in config.items():
        source = settings.config[name].source if name in settings.config else DEFAULT
        rows.append((f"config.{name}", value, source))
    return rows
