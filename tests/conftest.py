"""What all tests share: how hypothesis runs."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No deadline: the machine may be busy. No example database: what fails is planted as a test of its own.
settings.register_profile(
    "persist",
    deadline=None,
    database=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("persist")
