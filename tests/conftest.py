"""What all tests share: how hypothesis runs, and the seed of random histories.

Without PERSIST_SEED they are the same in each run. PERSIST_SEED=fresh, as `make test` has it, draws a seed and says it
at the top of the report; with that number in its place the same histories come again. PERSIST_SEED=fixed is as without.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading

import pytest
from hypothesis import HealthCheck, settings

VARIABLE = "PERSIST_SEED"


def _settings(name: str, *, derandomize: bool) -> None:
    """No deadline: the machine may be busy. No example database: what fails is planted as a test of its own."""
    settings.register_profile(
        name,
        deadline=None,
        database=None,
        derandomize=derandomize,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


_settings("fixed", derandomize=True)
_settings("fresh", derandomize=False)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose how random histories are drawn; workers of pytest-xdist inherit the number."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # some shells have it ignored
    seed = os.environ.get(VARIABLE)
    if seed == "fresh":
        seed = os.environ[VARIABLE] = str(secrets.randbits(32))
    if seed == "fixed":
        seed = os.environ.pop(VARIABLE) and None
    if seed is not None:
        config.option.hypothesis_seed = seed
    settings.load_profile("fixed" if config.option.hypothesis_seed is None else "fresh")


def pytest_report_header() -> str:
    """How to have the same histories again."""
    seed = os.environ.get(VARIABLE)
    return f"random histories: {'fixed' if seed is None else f'repeat them with {VARIABLE}={seed}'}"
