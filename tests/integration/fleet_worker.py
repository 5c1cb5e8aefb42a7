"""One machine of a fleet: appends to a shard until it is told to stop, with whatever release runs it.

    python fleet_worker.py URL CONSENSUS NAME PREFIX

Says on standard output what it got acknowledged, a JSON list a line, and how it ended. Stops when its standard input
ends.
"""

from __future__ import annotations

import json
import select
import sys

import persist_lib as persist

SCHEMA = persist.Schema(key={"id": "string not null"})


def say(*what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def is_told_to_stop() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def main(url: str, consensus: str, name: str, prefix: str) -> None:
    # Small parts are objects: what an old program does before it is refused would show in Blob as well.
    config = persist.Config(inline_bytes=0, part_bytes=64 * 1024, rollup_every=8)
    with persist.open(url, consensus or None, config=config) as client:
        try:
            write = client.open_writer(name, SCHEMA)
            say("ready", write.id)
            count = 0
            while not is_told_to_stop():
                upper = write.fetch_upper().time or 0
                update = {"id": f"{prefix}-{count}", "_time": upper}
                try:
                    done = write.compare_and_append([update], upper, upper + 1)
                except persist.UpperMismatch:
                    continue
                say("acked", update["id"], done.seqno)
                count += 1
        except persist.NewerFormat as error:
            say("newer", str(error))
        else:
            say("stopped")


if __name__ == "__main__":
    main(*sys.argv[1:])
