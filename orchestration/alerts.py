"""What tells people: each thing that is wrong once, to a webhook and to the log, and once more when it is over.

What is wrong is what `persist_lib.health` finds in the location, jobs whose newest run failed, and verdicts of checks
that health does not judge. Each has a key that stays. The sensor's cursor has the open ones, and whether the webhook
has taken each. What it has not taken is sent again at the next tick, under the same `Idempotency-Key`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
import urllib3

log = logging.getLogger("persist.alerts")
OF_DAGSTER = ("job", "asset check")
"""What troubles are about that Dagster knows of; all others are of the location."""
MOST_OPEN = 500
"""Things that are open at once. The rest is one more thing, which says how many they are."""
MOST_SENT = 50
"""Messages of one tick, so that it ends in time. The others follow at the next one."""
TIMEOUT_S = 10.0


class Trouble(msgspec.Struct, frozen=True):
    """One thing that is wrong: a `persist_lib.health.Problem`, or one of Dagster's. `link` is a path in its UI."""

    check: str
    about: str
    name: str
    says: str
    do: str
    page: str = ""
    is_damage: bool = False
    link: str = ""

    @property
    def key(self) -> str:
        """As that of a problem: the same in every look, whatever it says."""
        return f"{self.check}:{self.about}:{self.name}"


class Open(msgspec.Struct, frozen=True):
    """A trouble that was there at a look: since when (ms), whether the webhook knows it, and whether it is over."""

    trouble: Trouble
    since: int
    was_sent: bool = False
    is_over: bool = False


class Cursor(msgspec.Struct, frozen=True):
    """What a tick remembers: what is open, by key; and what health found last, when."""

    open: dict[str, Open] = {}
    found: tuple[Trouble, ...] = ()
    looked_ms: int = 0


def loads(cursor: str | None) -> Cursor:
    """The cursor. One that cannot be read remembers nothing: what is open is sent once more, under new keys."""
    try:
        return msgspec.json.decode(cursor or "{}", type=Cursor)
    except msgspec.MsgspecError:
        return Cursor()


def dumps(cursor: Cursor) -> str:
    """Its text."""
    return msgspec.json.encode(cursor).decode()


def compared(
    before: Mapping[str, Open], found: Iterable[Trouble], now: int, *, is_whole: bool = True
) -> dict[str, Open]:
    """What is open now. What was there and is not found is over, and stays until that was sent.

    Where the look at the location was not whole, what was found there before is not over: it is not known. What is over
    before it could be sent has both messages, in their order.
    """
    all_found = list(found)
    if (more := len(all_found) - MOST_OPEN) > 0:
        says = f"{more:,} more things are wrong, of {len(all_found):,}"
        more_of = Trouble("more", "location", "all", says, "persist health")
        all_found = [*all_found[:MOST_OPEN], more_of]
    there = {one.key: one for one in all_found}
    after: dict[str, Open] = {}
    for key, old in before.items():
        if key in there and not old.is_over:
            after[key] = msgspec.structs.replace(old, trouble=there.pop(key))
        elif not is_whole and not old.is_over and old.trouble.about not in OF_DAGSTER:
            after[key] = old
        else:
            after[key] = msgspec.structs.replace(old, is_over=True)
    for key, trouble in there.items():
        if key not in after:  # else both messages come: over, and then opened once more
            after[key] = Open(trouble, now)
    return after


class Webhook:
    """Where messages go; without a URL only to the log. The URL is a secret: it is in no message and no error."""

    def __init__(self, url: str, heartbeat: str, location: str) -> None:
        self._url, self._heartbeat, self._location = url, heartbeat, location
        self._pool = urllib3.PoolManager(timeout=TIMEOUT_S, retries=False)
        self.failed: list[str] = []

    def tell(self, was_open: Mapping[str, Open], is_open: Mapping[str, Open], now: int) -> dict[str, Open]:
        """Tell what is new and what is over. Answers what remains open, and what could not be told yet."""
        left: dict[str, Open] = {}
        count = 0
        for key, one in is_open.items():
            if key not in was_open:
                log.warning("opened: %s", line(one.trouble))
            if one.is_over and not was_open[key].is_over:
                log.warning("over: %s", line(one.trouble))
            current, events = one, [] if one.was_sent else ["opened"]
            for event in [*events, *(["over"] if one.is_over else [])]:
                count += 1
                # After one that was not taken none is tried: a tick has to end, and each may wait for its time.
                if self.failed or count > MOST_SENT or not self._send(event, current, now):  # type: ignore[arg-type]
                    left[key] = current
                    break
                current = msgspec.structs.replace(current, was_sent=True)
            else:
                if not one.is_over:
                    left[key] = current
        return left

    def beat(self) -> None:
        """Say that this watcher is alive, to what raises the alarm when it hears nothing."""
        if self._heartbeat:
            self._request("GET", self._heartbeat, "heartbeat")

    def _send(self, event: Literal["opened", "over"], one: Open, now: int) -> bool:
        if not self._url:
            return True
        trouble = one.trouble
        value: dict[str, Any] = {
            "event": event, "text": f"{event}: {line(trouble)}", "location": self._location, "since": one.since,
            "now": now, "key": trouble.key, **msgspec.to_builtins(trouble),
        }  # fmt: skip
        name = hashlib.blake2b(f"{self._location} {trouble.key} {one.since} {event}".encode(), digest_size=16)
        body, headers = json.dumps(value).encode(), {"Content-Type": "application/json"}
        return self._request("POST", self._url, trouble.key, body, headers | {"Idempotency-Key": name.hexdigest()})

    def _request(
        self, method: str, url: str, about: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> bool:  # fmt: skip
        try:
            answer = self._pool.request(method, url, body=body, headers=headers)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            says = type(error).__name__  # its text has the URL
        else:
            if 200 <= answer.status < 300:
                return True
            says = f"status {answer.status}"
        self.failed.append(f"{about}: {urlsplit(url).hostname} answers with {says}")
        return False


def line(trouble: Trouble) -> str:
    """A trouble in one line."""
    return f"{trouble.check} {trouble.about} {trouble.name}: {trouble.says} ({trouble.do})"
