"""The `persist` command in this process, and as a process of its own without the start of an interpreter.

`forked()` is a program for that: it hands its words, folder, environment and streams to a process that has all of the
command loaded, has that fork, and exits as the fork does. What depends on how an interpreter starts (the encoding of
its streams, what it imports) needs the real command, and so does what sends it signals.
"""

from __future__ import annotations

import atexit
import gc
import os
import select
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import typer.main
import typer.testing

from persist_lib.cli.app import app

typer.main.get_command = cache(typer.main.get_command)
typer.testing._get_command = typer.main.get_command  # type: ignore[attr-defined]
SETTINGS: dict[str, Any] = dict.fromkeys(
    ("PERSIST_LOCATION", "PERSIST_CONSENSUS", "PERSIST_PRICES", "PERSIST_CONFIG", "COLUMNS")
)
"""What a command takes from the environment, as what is not set."""


def invoke(*words: object, typed: str | None = None, **env: str | None) -> typer.testing.Result:
    """Call the command here, with no settings in its environment but these."""
    return typer.testing.CliRunner().invoke(app, list(map(str, words)), env={**SETTINGS, **env}, input=typed)


CLIENT = """\
#!{python} -IS
import os, socket, sys
def is_open(number):
    try: os.fstat(number)
    except OSError: return False
    return True
streams = [number for number in (0, 1, 2) if is_open(number)]
while os.open(os.devnull, os.O_RDWR) < 3: pass
ask = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
ask.connect({address!r})
socket.send_fds(ask, [repr((sys.argv[1:], os.getcwd(), dict(os.environ), streams)).encode()], streams)
for number in streams: os.close(number)
os._exit(ask.recv(1)[0])
"""


@cache
def forked() -> str:
    """The path of a program that does what the installed command does."""
    folder = Path(tempfile.mkdtemp(prefix="forked-"))
    address, program = folder / "asked", folder / "persist"
    server = subprocess.Popen([sys.executable, "-m", "tests.commands", address], stdin=-1, stdout=-1)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    atexit.register(server.communicate)
    program.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    program.chmod(0o755)
    return str(program)


def _serve(address: str) -> None:
    """Fork for each client, until standard input ends; returns in each fork, to do what the client asked for."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        waiting = 0
        while listening.fileno() in select.select([listening.fileno(), 0], [], [])[0]:
            asking, _ = listening.accept()
            if os.fork() == 0:
                break
            asking.close()
            waiting += 1
            while waiting and os.waitpid(-1, os.WNOHANG)[0]:
                waiting -= 1
        else:
            os._exit(0)
    asked, streams, _, _ = socket.recv_fds(asking, 1 << 20, 3)
    if command := os.fork():
        for number in (0, 1, 2, *streams):
            os.close(number)
        asking.send(bytes([os.waitstatus_to_exitcode(os.waitpid(command, 0)[1]) & 0xFF]))
        os._exit(0)
    asking.close()
    words, folder, environment, numbers = eval(asked)
    _begin(words, folder, environment, dict(zip(numbers, streams, strict=True)))


def _begin(words: list[str], folder: str, environment: dict[str, str], streams: dict[int, int]) -> None:
    """Be as an interpreter that has just started."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = words
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.close(number)
        setattr(sys, name, None)
        if number in streams:
            os.dup2(streams[number], number)
            os.close(streams[number])
            errors = "backslashreplace" if name == "stderr" else "strict"
            setattr(sys, name, open(number, "w" if number else "r", errors=errors, closefd=False))  # noqa: SIM115


if __name__ == "__main__":
    import apsw  # noqa: F401
    import pyarrow.csv  # noqa: F401
    import rich.columns
    import rich.markdown
    import rich.traceback  # noqa: F401

    import persist_lib.catalog.controller
    import persist_lib.cli
    import persist_lib.client
    import persist_lib.location.file

    typer.main.get_command(app)
    gc.collect()
    gc.freeze()  # so that no fork looks through what it shares with the others
    _serve(sys.argv[1])
    persist_lib.cli.main()
