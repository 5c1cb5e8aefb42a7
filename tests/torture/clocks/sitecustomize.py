"""A machine's clock that is wrong: imported by Python before anything else, where this folder is on PYTHONPATH.

PERSIST_TEST_CLOCK says how: `+3d` and `-3d` are days off, `+3h` and `-3h` hours, `stepping` jumps by days about each
second, `twitching` by up to 40 s, `drifting` gains and loses a day within seconds, `fast` runs three times as fast, and
`backwards` goes back. The monotonic clock stays what it is, as on a real machine.
"""

import math
import os
import random
import time
from collections.abc import Callable

DAY_S = 86_400
_time, _monotonic = time.time, time.monotonic
_began = _monotonic()
_rng = random.Random(os.getpid())
_steps: dict[int, float] = {}


def _stepping() -> float:
    return _steps.setdefault(int(_monotonic()), _rng.choice([-3 * DAY_S, -3600, 0, 0, 3600, 3 * DAY_S]))


def _twitching() -> float:
    return _steps.setdefault(int(4 * _monotonic()), _rng.choice([-40, -5, 0, 0, 5, 40]))


def _drifting() -> float:
    return DAY_S * math.sin(_monotonic())


OFF: dict[str, Callable[[], float]] = {
    "+3d": lambda: 3.0 * DAY_S,
    "-3d": lambda: -3.0 * DAY_S,
    "+3h": lambda: 3.0 * 3600,
    "-3h": lambda: -3.0 * 3600,
    "fast": lambda: 2 * (_monotonic() - _began),
    "backwards": lambda: -2 * (_monotonic() - _began),
    "stepping": _stepping,
    "twitching": _twitching,
    "drifting": _drifting,
}

_told = os.environ.get("PERSIST_TEST_CLOCK", "")
if _told:
    _off = OFF[_told]
    time.time = lambda: _time() + _off()
    time.time_ns = lambda: int((_time() + _off()) * 1e9)
