"""Ends a server when the process that started it is gone, however it ended: `python guard.py PID SIGNAL [FOLDER]`.

`servers` starts the guard, holds the other end of its standard input, and kills it when it ends the server itself.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys


def main(pid: int, number: int, *folders: str) -> None:
    """Wait for the end of standard input; then end the process, and remove its folder."""
    server = os.pidfd_open(pid)  # not the pid itself: by then it may belong to another process
    sys.stdin.read()
    signal.pidfd_send_signal(server, number)
    select.select([server], [], [], 30)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
