"""Declare the source of orders, once: `python -m shop.setup FOLDER`. Running it again changes nothing.

Whatever drops files of JSON lines into the folder brings orders; the newest line of an order is what holds.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import persist_lib as persist
from orchestration.settings import Settings, resolved
from persist_lib.sources import Files, Meaning
from shop.orders import ORDERS


def declare(client: persist.Client, folder: Path) -> bool:
    """Whether it was declared now."""
    folder.mkdir(parents=True, exist_ok=True)
    with closing(client.sources()) as sources:
        if "orders" in sources.list():
            return False
        sources.create("orders", Files(place=str(folder), format="jsonl"), ORDERS, meaning=Meaning(envelope="upsert"))
    return True


def main() -> None:
    """Open the location of the environment, and declare it there."""
    settings = resolved(Settings())
    with persist.open(settings.location or "", settings.consensus) as client:
        print("declared" if declare(client, Path(sys.argv[1]).resolve()) else "it is declared already")


if __name__ == "__main__":
    main()
