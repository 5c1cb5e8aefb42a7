"""What a client does to two shards, each call until it is done; and what must be there at its end, whatever broke."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import persist_lib as persist
from persist_lib.errors import Determinate, HoldConflict, Indeterminate, LeaseExpired
from persist_lib.testing import check_world, contents_of, updates_of

SCHEMA = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
EAGER = persist.Policy(weight=1e9)
ATTEMPTS = 12
"""How often a call is tried. A fault strikes once, so that it is done far before, or it hangs."""
Call = Callable[[bytes | None], Any]


def rows(*ids: int, time: int, word: str = "w") -> list[dict[str, Any]]:
    return [{"id": id_, "word": word, "_time": time} for id_ in ids]


def tokened(call: Callable[..., Any], token: bytes | None) -> Any:
    return call(token=token)


def untokened(call: Callable[[], Any], _token: bytes | None) -> Any:
    return call()


class Workload:
    """One run: `run`, then `check` by a client that nothing is broken for. `told`: what calls raised, by name."""

    def __init__(self, client: persist.Client) -> None:
        self.client = client
        self.told: list[tuple[str, str]] = []
        self.expected: Counter[tuple[Any, Any]] = Counter()
        self.heard: Counter[tuple[Any, int]] = Counter()
        self.upper = 0
        self.has_failed = False

    def until_done(self, name: str, call: Call) -> Any:
        """Repeat a call as its user does: with its token where that is told. Raises AssertionError if it never ends."""
        token: bytes | None = None
        for _ in range(ATTEMPTS):
            try:
                return call(token)
            except (Determinate, Indeterminate, LeaseExpired) as error:
                token = cast("bytes | None", error.fields.get("token")) or token
                self.told.append((name, type(error).__name__))
        raise AssertionError(f"{name} is not done after {ATTEMPTS} attempts: {self.told[-ATTEMPTS:]}")

    def run(self) -> None:
        self.write = self.until_done("open", lambda _: self.client.open_writer("s", SCHEMA))
        self.other = self.until_done("open other", lambda _: self.client.open_writer("t", SCHEMA))
        self.read = self.until_done("read", lambda _: self.client.open_reader("s"))
        self.listen = self.until_done("listen", lambda _: self.read.listen(0))
        self.explicit(2)
        self.hear()
        self.definite()
        self.by_key()
        self.queued()
        self.holds()
        self.several()
        self.upkeep()
        self.explicit(1)
        self.hear()
        for handle in (self.read, self.write, self.other):
            self.until_done("close", partial(untokened, handle.close))

    def explicit(self, count: int) -> None:
        for _ in range(count):
            lower, data = self.upper, rows(self.upper, 100 + self.upper, time=self.upper)
            call = partial(self.write.compare_and_append, data, lower, lower + 1)
            self.until_done("compare_and_append", partial(tokened, call))
            self.expect(data, lower + 1)

    def definite(self) -> None:
        """An append whose first half others have appended already."""
        lower, data = self.upper, rows(200, time=self.upper)
        overlap = rows(lower - 1, 100 + lower - 1, time=lower - 1)
        self.until_done("append", lambda token: self.write.append(overlap + data, lower - 1, lower + 1, token=token))
        self.expect(data, lower + 1)

    def by_key(self) -> None:
        self.until_done("upsert", lambda token: self.write.upsert([{"id": 0, "word": "new"}], token=token))
        self.expected[0, "w"] -= 1
        self.expect(rows(0, time=0, word="new"), self.upper + 1)
        self.until_done("append_now", lambda token: self.write.append_now([{"id": 300, "word": "w"}], token=token))
        self.expect(rows(300, time=0), self.upper + 1)

    def queued(self) -> None:
        lower, data = self.upper, rows(400, time=self.upper)
        self.until_done(
            "append_async",
            lambda token: self.write.append_async(data, lower, lower + 1, token=token).result(0),
        )
        self.expect(data, lower + 1)

    def holds(self) -> None:
        for name in ("kept", "gone"):
            self.until_done("set_hold", partial(untokened, partial(self.client.set_hold, "s", name, 1)))
        self.until_done("release_hold", lambda _: self.release("gone"))
        self.until_done("downgrade", lambda _: self.read.downgrade_since(1))

    def release(self, name: str) -> None:
        """Repeated after an unknown outcome, it finds that there is no such hold any more: then it is done."""
        try:
            self.client.release_hold("s", name)
        except HoldConflict:
            assert ("release_hold", "Indeterminate") in self.told

    def several(self) -> None:
        lower, data = self.upper, rows(500, time=self.upper)

        def commit(token: bytes | None) -> None:
            parts = [
                persist.Append(self.write, data, lower, lower + 1),
                persist.Append(self.other, rows(1, time=0), 0, 1),
            ]
            self.client.compare_and_append_many(parts, token=token)

        self.until_done("compare_and_append_many", commit)
        self.expect(data, lower + 1)

    def upkeep(self) -> None:
        """Compaction by a worker, the newest rollup, expiry of what is due."""
        self.until_done("compact", lambda _: self.client.compact("s", policy=EAGER))
        self.until_done("roll_up", lambda _: self.client.roll_up("s", force=True))
        self.until_done("expire", lambda _: self.client.expire("s"))
        self.until_done("heartbeat", lambda _: self.client.heartbeat())
        self.until_done("collect", lambda _: self.client.collect("s"))

    def hear(self) -> None:
        for event in self.until_done("poll", lambda _: self.poll()):
            if isinstance(event, persist.Updates):
                for row, time, diff in updates_of(event.table):
                    self.heard[row, time] += diff

    def poll(self) -> list[Any]:
        """What is new. A listener that has failed says so for ever: another one continues where it stopped."""
        if self.has_failed:
            self.listen = self.read.listen((self.listen.frontier.time or 1) - 1)
        self.has_failed = True
        found = self.listen.poll()
        self.has_failed = False
        return found

    def expect(self, data: list[dict[str, Any]], upper: int) -> None:
        for row in data:
            self.expected[row["id"], row["word"]] += 1
        self.upper = upper

    def check(self, witness: persist.Client) -> None:
        """Raise AssertionError if something is lost, doubled or left."""
        worlds = {shard: check_world(witness, shard) for shard in "st"}
        state = worlds["s"].state
        assert state.upper == persist.at(self.upper)
        assert worlds["t"].state.upper == persist.at(1)
        assert set(state.holds) == {"kept"}
        contents = Counter({row: count for row, count in self.expected.items() if count})
        with witness.open_reader("s") as read, witness.open_reader("t") as other:
            assert contents_of(read.snapshot(self.upper - 1, diff=True).to_arrow()) == contents
            assert contents_of(other.snapshot(0, diff=True).to_arrow()) == Counter({(1, "w"): 1})
        # What was heard came after time 0, each update once.
        heard = Counter({(0, "w"): 1, (100, "w"): 1})
        for (row, _), diff in self.heard.items():
            heard[row] += diff
        assert {row: count for row, count in heard.items() if count} == contents
        self.check_ids(witness)

    def check_ids(self, witness: persist.Client) -> None:
        """No id of ours stays behind but those of which the client was told that it does not know."""
        state = witness.machine("s").fetch().state
        left = len(state.writers) + len(state.readers)
        assert left <= len(self.told), f"{left} ids are left, and {self.told}"
