"""What is due on all shards, asked of a server: one request, the same answer as a survey of one's own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib.core.duties import NAMES
from persist_lib.errors import InvalidUsage, NotAllowed
from persist_lib.location.wrap.around import AroundConsensus, Operation
from persist_lib.maintain import survey
from persist_lib.server import rpc_calls
from persist_lib.server.shard_server import ShardServer
from tests.shards import TINY
from tests.unit.maintain.surveys import make, move
from tests.unit.server.sites import Site, site_of
from tests.worlds import SCHEMA, row

CONFIG = TINY.model_copy(update={"format": 4, "timeout_s": 20, "lease_ms": 60_000})
NAMED = [f"s{n:02d}" for n in range(24)]


class Counting(AroundConsensus):
    """What a server asks of its store."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.asked: list[Operation] = []

    def around(self, operation: Operation, call: Any) -> Any:
        self.asked.append(operation)
        return call()

    def reads(self) -> list[str]:
        found = [one.kind for one in self.asked]
        self.asked.clear()
        return found


class Debts(Site):
    """A location with shards in different states, and a server for it whose requests are counted."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, config=CONFIG)
        self.counting = Counting(self.store.consensus)
        self.store.consensus = self.counting  # type: ignore[assignment]
        self.fill()
        self.serve()

    def fill(self) -> None:
        with persist.open(self.url, config=CONFIG) as client:
            make(client, *NAMED[:8])
            make(client, *NAMED[8:16], appends=3)
            for name in NAMED[16:]:
                write = client.open_writer(name, SCHEMA)
                for n in range(24):
                    write.compare_and_append([row(n % 3, time=n)], n, n + 1)
                client.set_retention(name, 2)
            client.compact(NAMED[20])

    def direct(self, **options: Any) -> persist.Survey:
        """What a client of its own finds, which was told nothing by anybody."""
        with persist.open(self.url, config=CONFIG, read_only=True) as client:
            for key in [one.key for one in self.store.blob.list("-survey/")]:
                self.store.blob.delete(key)
            return client.survey(**options)

    def client(self, *servers: ShardServer, **options: Any) -> persist.Client:
        return super().client(*servers, config=options.pop("config", CONFIG), **options)


site = site_of(Debts)


def asked(client: persist.Client) -> dict[str, int]:
    return {kind: count.calls for kind, count in client.metrics().operations.items() if kind not in ("open", "now")}


def same(one: persist.Survey, other: persist.Survey) -> None:
    assert {duty: set(one.due(duty)) for duty in NAMES} == {duty: set(other.due(duty)) for duty in NAMES}
    assert one.due("compaction") == other.due("compaction"), "the greatest debt comes first"
    assert (one.heads, one.waiting, one.unread) == (other.heads, other.waiting, other.unread)
    assert {name: (look.due, look.debt, look.mark) for name, look in one.looks.items()} == {
        name: (look.due, look.debt, look.mark) for name, look in other.looks.items()
    }


def test_it_is_what_a_survey_of_one_s_own_finds(site: Debts) -> None:
    found = site.client().survey()
    assert any(found.due(duty) for duty in ("compaction", "retention", "garbage", "rollups")), "nothing to compare"
    same(found, site.direct())
    move(site.client(), *NAMED[:3])
    with persist.open(site.url, config=CONFIG) as other:
        move(other, *NAMED[3:6])
        other.open_writer("new", SCHEMA).close()
        other.maintain(NAMED[17])
    found = site.client().survey()
    assert "new" in found.heads
    same(found, site.direct())


def test_all_shards_cost_one_request(site: Debts) -> None:
    client = site.client()
    first = client.survey()
    assert asked(client) == {"debts": 1, "list": 1}, "and one listing of what is paused"
    assert first.cost.requests == 2
    site.counting.reads()
    client.survey()
    assert asked(client) == {"debts": 2, "list": 2}
    assert site.counting.reads() == ["heads"], "and one of the server's"


def test_what_the_server_commits_is_looked_at_in_its_memory(site: Debts) -> None:
    client = site.client()
    client.survey()
    write = client.open_writer(NAMED[0], SCHEMA)
    for _ in range(3):
        write.append_now([row(9)])
    site.counting.reads()
    client.survey()
    assert site.counting.reads() == ["heads"]
    with persist.open(site.url, config=CONFIG) as other:
        move(other, *NAMED[:3])
    site.counting.reads()
    found = client.survey()
    kinds = site.counting.reads()
    assert found.waiting == 0
    assert found.looks[NAMED[0]].seqno == site.store.consensus.heads()[NAMED[0]]
    assert kinds.count("heads") == 1
    assert set(kinds) <= {"heads", "head", "scan"}
    assert len(kinds) <= 1 + 3 * 3, "only the three that others have moved"


def test_a_client_of_other_settings_looks_for_itself(site: Debts) -> None:
    site.client().survey()
    eager = site.client(config=CONFIG.model_copy(update={"compaction_weight": 1e9, "compaction_advance": 0.01}))
    found = eager.survey()
    assert asked(eager)["heads"] == 1
    with persist.open(site.url, config=eager.config, read_only=True) as direct:
        same(found, direct.survey())


def test_what_was_done_is_noted_and_not_due_until_the_shard_moves(site: Debts) -> None:
    client = site.client()
    due = client.survey().due("scrub")
    assert set(due) == set(NAMED)
    found = client.survey(done={"scrub": NAMED[:10]})
    assert set(found.due("scrub")) == set(NAMED[10:])
    assert set(site.client().survey().due("scrub")) == set(NAMED[10:])
    move(client, NAMED[0])
    assert set(client.survey().due("scrub")) == {NAMED[0], *NAMED[10:]}
    with pytest.raises(InvalidUsage):
        client.survey(done={"levitation": []})


def test_a_read_only_client_asks_as_well_and_notes_nothing(site: Debts) -> None:
    client = site.client(read_only=True)
    client.survey()
    assert asked(client) == {"debts": 1, "list": 1}
    assert NAMED[0] not in client.survey(done={"scrub": NAMED[:1]}).due("scrub"), "it remembers for itself"
    assert NAMED[0] in site.client().survey().due("scrub")


def test_what_was_not_looked_at_yet_waits_and_is_kept_between_requests(
    site: Debts, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, seen = site.client(), []
    assert client.survey(most=5).waiting == len(NAMED) - 5
    assert client.survey(most=5).waiting == len(NAMED) - 10
    monkeypatch.setattr(rpc_calls, "LOOKS_S", 0.0)  # each request looks at nothing: what is there is what was kept
    assert client.survey(seconds=0).waiting == len(NAMED) - 10
    rounds = iter(range(100))
    monkeypatch.setattr(survey, "ROUND_S", 0.0)

    def told(done: int, of: int) -> None:
        seen.append((done, of))
        if next(rounds) == 3:
            monkeypatch.setattr(rpc_calls, "LOOKS_S", 5.0)
            monkeypatch.setattr(survey, "ROUND_S", 5.0)

    found = client.survey(progress=told)
    assert found.waiting == 0
    assert seen[0] == (10, len(NAMED))
    assert seen[-1] == (len(NAMED), len(NAMED))
    same(found, site.direct())
    monkeypatch.setattr(rpc_calls, "LOOKS_S", 0.0)
    with persist.open(site.url, config=CONFIG) as other:
        move(other, *NAMED[16:19])
    later = client.survey(seconds=0)
    assert later.waiting == 3
    assert later.heads == site.store.consensus.heads()
    assert not {*NAMED[16:19]} & {name for duty in NAMES for name in later.due(duty)}, "by looks at what has moved"


def test_those_that_ask_at_once_share_a_survey_that_begins_afterwards(site: Debts) -> None:
    clients = [site.client() for _ in range(6)]
    clients[0].survey()
    site.counting.reads()
    server = site.servers[0]
    with ThreadPoolExecutor(6) as pool:
        with server._calls.looks._turn:  # all of them come while a survey is under way
            answers = [pool.submit(client.survey) for client in clients]
            while server._calls.looks._asked < 7:
                threading.Event().wait(0.005)
            move(site.store, NAMED[5])
        found = [answer.result(30) for answer in answers]
    assert {one.heads[NAMED[5]] for one in found} == {site.store.consensus.heads()[NAMED[5]]}
    assert site.counting.reads().count("heads") == 1 + 1, "and the one of this test"


def test_a_client_sees_the_shards_that_it_has_a_right_on(
    site: Debts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, token = tmp_path / "tokens.toml", "someone-0123456789abcdefghij"
    tokens.write_text(
        f'[clients.a]\ntoken = "{token}"\nrights = {{ "s0*" = ["read"], "s10" = ["maintain"], "s11" = ["append"] }}\n'
    )
    server = ShardServer(site.store, "127.0.0.1:0", token_file=tokens)
    server.start()
    site.servers.append(server)
    monkeypatch.setenv("PERSIST_TOKEN", token)
    client = site.client(server)
    found, visible = client.survey(), {*NAMED[:10], "s10", "s11"}
    assert set(found.heads) == set(found.looks) == visible
    assert set(found.due("scrub")) == visible
    assert client.survey(most=0).waiting == 0
    with pytest.raises(NotAllowed, match="maintain"):
        client.survey(done={"scrub": ["s10", "s01"]})
    assert "s10" in client.survey().due("scrub"), "nothing was noted"
    assert "s10" not in client.survey(done={"scrub": ["s10"]}).due("scrub")


def test_a_shard_that_cannot_be_read_is_named_with_its_reason(site: Debts) -> None:
    site.client().survey()
    head = site.store.consensus.head(NAMED[4])
    assert head is not None
    assert site.store.consensus.compare_and_set(NAMED[4], head.newest, b"\x04" + bytes(40))
    found, direct = site.client().survey(), site.direct()
    assert set(found.unread) == {NAMED[4]} == set(direct.unread)
    assert found.due("compaction")[-1] == NAMED[4]
    assert {duty: set(found.due(duty)) for duty in NAMES} == {duty: set(direct.due(duty)) for duty in NAMES}
