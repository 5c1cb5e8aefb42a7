"""What runs on a client's host: roles of `Site`, until it shall stop, and the check of what all clients learned.

    python -m tests.hosts.client_program URL CONSENSUS SERVED ROLE[:NUMBER]...

It reads a command a line: `stop FILE` ends the roles and leaves in the file what they were told, and which servers they
waited for; `check FILE...` adds what others were told and compares all with what is there. It prints a line of JSON now
and then: how far each role came.
"""

from __future__ import annotations

import json
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from persist_lib.location.rpc.servers import Server, Servers
from tests.faults.shard_servers import Site

TOLD = ("acked", "doubted", "paired", "appends", "reads", "heard", "frontier", "moves", "passes", "expired")
SHOWN = {"write": "acked", "pair": "paired", "listen": "heard", "look": "reads", "hold": "moves", "tend": "passes"}
"""By role: what shows how far it has come."""
EVERY_S, LONG_S = 0.1, 0.9
Wait = tuple[float, float, str]
"""When a thread began to wait for one server, when that ended, and for what it waited and what came of it."""


def say(**said: Any) -> None:
    print(json.dumps(said), flush=True)


def progress(site: Site, roles: Iterable[str]) -> dict[str, Any]:
    """How far each role has come, and when that was."""
    found = {SHOWN[role]: getattr(site, SHOWN[role]) for role in roles}
    return {"at": time.monotonic()} | {name: n if isinstance(n, int) else len(n) for name, n in found.items()}


def report(site: Site, roles: Iterable[str]) -> None:
    while not site.ends.wait(EVERY_S):
        say(**progress(site, roles))


def watch(waits: list[Wait]) -> None:
    """Note what each long wait for a server was for: a connection, or an answer within its share of a call's time."""

    def watched(kind: type, name: str, told: Callable[..., str]) -> None:
        inner = getattr(kind, name)

        def call(self: Any, *given: Any) -> Any:
            began, outcome = time.monotonic(), "answered"
            try:
                return inner(self, *given)
            except Exception as error:
                outcome = str(error)
                raise
            finally:
                if (ended := time.monotonic()) - began > LONG_S:
                    waits.append((began, ended, f"{threading.current_thread().name}: {told(self, *given)}: {outcome}"))

        setattr(kind, name, call)

    watched(Server, "_ready", lambda server, seconds: f"a connection to {server.address} within {seconds:.2f} s")
    watched(
        Servers,
        "_ask",
        lambda _, server, __, name, *given: f"{name} of {server.address} within {given[-1]:.2f} of {given[-2]:.2f} s",
    )


def main(url: str, consensus: str, served: str, *roles: str) -> None:
    waits: list[Wait] = []
    watch(waits)
    site = Site(url, consensus, served)
    named = [role.partition(":") for role in roles]
    threads = [site.start(getattr(site, role), *([int(number)] if number else [])) for role, _, number in named]
    threading.Thread(target=report, args=(site, [role for role, _, _ in named]), daemon=True).start()
    for line in sys.stdin:
        match line.split():
            case ["stop", file]:
                site.ends.set()
                for thread in threads:
                    thread.join(60)
                hung = [thread.name for thread in threads if thread.is_alive()]
                failed = ["".join(traceback.format_exception(error)) for error in site.failures]
                Path(file).write_bytes(pickle.dumps({name: getattr(site, name) for name in TOLD} | {"waits": waits}))
                say(stopped=hung + failed)
            case ["check", *files]:
                for file in files:
                    told = pickle.loads(Path(file).read_bytes())
                    for name in TOLD:
                        setattr(site, name, getattr(site, name) + told[name])
                try:
                    say(checked=site.check())
                except AssertionError as error:
                    say(broken="".join(traceback.format_exception(error)))
            case _:
                break
    site.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
