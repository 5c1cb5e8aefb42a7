"""What is wrong with a source, by limits that somebody set: for `persist source check`, Dagster, and other monitors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from persist_lib.arguments import parse_integer, shown
from persist_lib.config import MIB
from persist_lib.errors import InvalidUsage

if TYPE_CHECKING:
    from persist_lib.storage.sources.described import SourceDescription

Check = Literal["instances", "lag", "errors", "held_back"]
CHECKS: tuple[Check, ...] = ("instances", "lag", "errors", "held_back")


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From when on something is wrong. None: never.

    `instances` is how many have to be at work; `behind_s`, `lag_messages` and `lag_bytes` how far it may be behind;
    `errors` how many bad messages there may be, `errors_share` which share of the messages of present instances; and
    `held_back_bytes` how much the upstream may have to keep.
    """

    instances: int | None = 1
    behind_s: int | None = 300
    lag_messages: int | None = None
    lag_bytes: int | None = None
    errors: int | None = None
    errors_share: float | None = 0.01
    held_back_bytes: int | None = 10 * 1024 * MIB

    def __post_init__(self) -> None:
        for name in ("instances", "behind_s", "lag_messages", "lag_bytes", "errors", "held_back_bytes"):
            if (value := getattr(self, name)) is not None:
                parse_integer(value, name, 0)
        share = self.errors_share
        if share is not None and (
            isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1
        ):
            raise InvalidUsage(f"errors_share must be from 0 to 1: got {shown(share)}")


class Alert(msgspec.Struct, frozen=True):
    """The verdict of one check. `value` is what was measured, None if it is not known."""

    check: Check
    passed: bool
    says: str
    value: float | None = None


def judge(found: SourceDescription, limits: Limits | None = None, *, is_idle: bool = False) -> list[Alert]:
    """All verdicts on a source, in the order of `CHECKS`. A source that somebody paused only has to have no errors.

    `is_idle` says that nothing is left upstream, so that a source that stands still is not behind.
    """
    limits = limits or Limits()
    lag = Alert("lag", True, "there is nothing new", 0) if is_idle else _lag(found, limits)
    return [_instances(found, limits), lag, _errors(found, limits), _held_back(found, limits)]


def _instances(found: SourceDescription, limits: Limits) -> Alert:
    alive = len(found.alive)
    if found.state == "paused":
        return Alert("instances", True, f"it is paused{': ' if found.why else ''}{found.why}", alive)
    failed = next((one for one in found.instances if one["state"] == "failed"), None)
    passed = limits.instances is None or alive >= limits.instances
    why = "" if failed is None or passed else f"; one failed: {failed['why']}"
    return Alert("instances", passed, f"{alive} at work, and {limits.instances or 0} should be{why}", alive)


def _lag(found: SourceDescription, limits: Limits) -> Alert:
    behind_s = found.behind_ms / 1000
    if found.state == "paused":
        return Alert("lag", True, f"it is paused, {behind_s:,.0f} s behind", behind_s)
    wrong = []
    if limits.behind_s is not None and behind_s > limits.behind_s:
        wrong.append(f"{behind_s:,.0f} s behind, and {limits.behind_s:,} s are allowed")
    for name, what in (("lag_messages", "messages"), ("lag_bytes", "bytes")):
        left = max((int(str(one[name])) for one in found.alive if one.get(name) is not None), default=None)
        limit = getattr(limits, name)
        if limit is not None and left is not None and left > limit:
            wrong.append(f"{left:,} {what} are left, and {limit:,} are allowed")
    return Alert("lag", not wrong, "; ".join(wrong) or f"{behind_s:,.0f} s behind", behind_s)


def _errors(found: SourceDescription, limits: Limits) -> Alert:
    wrong = []
    if limits.errors is not None and found.errors > limits.errors:
        wrong.append(f"{found.errors:,} messages were bad, and {limits.errors:,} are allowed")
    messages = sum(int(str(one["messages"])) for one in found.alive)
    bad = sum(int(str(one["errors"])) for one in found.alive)
    share = bad / messages if messages else 0.0
    if limits.errors_share is not None and share > limits.errors_share:
        wrong.append(f"{bad:,} of the last {messages:,} messages were bad: see {found.collections.get('errors', '')}")
    return Alert("errors", not wrong, "; ".join(wrong) or f"{found.errors:,} bad messages in all", found.errors)


def _held_back(found: SourceDescription, limits: Limits) -> Alert:
    kept = [int(str(one["held_back_bytes"])) for one in found.instances if one.get("held_back_bytes") is not None]
    if not kept:
        return Alert("held_back", True, "the upstream holds back nothing that is known")
    most = max(kept)
    passed = limits.held_back_bytes is None or most <= limits.held_back_bytes
    says = f"the upstream holds back {most / MIB:,.0f} MiB of its log for this source"
    return Alert("held_back", passed, says, most)
