"""Make what `make dev` needs: DAGSTER_HOME with this repository's dagster.yaml, and the default location.

    python scripts/dagster_home.py .dagster [file:./data]

A location that a user named is never created: a typing error would look like an empty location.
"""

from __future__ import annotations

import sys
from pathlib import Path

import dagster as dg

import persist_lib as persist
from orchestration.mount import Mount
from orchestration.partitions import begin

SETTINGS = Path(__file__).resolve().parent.parent / "dagster.yaml"
CURSORS = [f"EVENT_LOG_CONSUMER_CURSOR-{kind}" for kind in ("PIPELINE_FAILURE", "PIPELINE_SUCCESS")]
"""Where Dagster's daemon of run retries is. On its first start it warns that there are none."""


def make_home(home: Path) -> None:
    """Make the folder, link the settings, write the daemon's first cursors, and draw grey what never ran.

    Doing it again changes nothing.
    """
    home.mkdir(parents=True, exist_ok=True)
    settings = home / "dagster.yaml"
    if not settings.is_symlink() or settings.readlink() != SETTINGS:
        settings.unlink(missing_ok=True)
        settings.symlink_to(SETTINGS)
    with dg.DagsterInstance.from_config(str(home)) as instance:
        storage = instance.daemon_cursor_storage
        known = storage.get_cursor_values(set(CURSORS))
        if missing := {key: "0" for key in CURSORS if key not in known}:
            storage.set_cursor_values(missing)
        begin(instance, Mount())


def main() -> None:
    """Make the home, and the location if one is given."""
    make_home(Path(sys.argv[1]).absolute())
    for location in sys.argv[2:]:
        persist.open(location).close()


if __name__ == "__main__":
    main()
