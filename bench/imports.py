"""What an import costs beside `import pyarrow`, which everything here needs: each in a fresh interpreter, in turn.

Seconds are those of the processor, so that two cores that others use as well do not count.
"""

from __future__ import annotations

import resource
import subprocess
import sys

from bench.figures import Figure, beside

ALLOWED_S = 0.1
"""How much longer than pyarrow alone an import of ours may take."""


def imports(quick: bool = False) -> list[Figure]:
    """The import itself, the first use, and the help of the command."""
    rounds = 1 if quick else 11
    figures = []
    for name, program, at_most in (
        ("import persist_lib", "import persist_lib", 1.0),
        ("persist --help", "import sys; sys.argv[1:] = ['--help']; from persist_lib.cli import main; main()", None),
        ("import, and the first name", "import persist_lib; persist_lib.open", None),
    ):
        ours, peer = beside(lambda program=program: _seconds(program), lambda: _seconds("import pyarrow"), rounds)  # type: ignore[misc]
        limit = peer + (ALLOWED_S if at_most else 0)
        beside_what = "import pyarrow, and 0.1 s" if at_most else "import pyarrow"
        note = f"{ours - peer:+.2f} s to import pyarrow"
        figures.append(Figure(name, ours, limit, "s", beside_what, at_most=at_most, note=note))
    return figures


def _seconds(program: str) -> float:
    """What a fresh interpreter spends on a program, with its own start."""
    before = _spent()
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
    return _spent() - before


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
