"""Tokens and rights: who is refused at the door, who may do what to which shard, and that no token is ever shown.

And the bounds over all shards of a server: one client cannot fill it, and heartbeats are in none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import persist_lib as persist
from persist_lib import streams
from persist_lib.cli.history import fetch_rows
from persist_lib.core import commands as c
from persist_lib.errors import Determinate, Indeterminate, InvalidUsage, NotAllowed, NotAuthenticated, Overloaded
from persist_lib.format import wire
from persist_lib.frontier import MINIMUM
from persist_lib.ids import SeqNo, ShardId, format_reader_id, format_writer_id
from persist_lib.location.api import Newest
from persist_lib.location.commands import Proposed
from persist_lib.location.rpc.consensus import RpcConsensus, canonical
from persist_lib.location.rpc.credentials import Credentials, check_secret
from persist_lib.location.rpc.servers import Servers
from persist_lib.runtime.ambient import Runtime
from persist_lib.server.access import BYTES_MOST, BYTES_OF_A_CLIENT, Access, Load
from persist_lib.shard.commit import until_answered
from persist_lib.shard.funnels import Heart
from persist_lib.streams.lock import break_lock, fetch_lock
from tests.unit.core.rights_of_commands import every_command_with_its_rights
from tests.unit.server.sites import Site, site_of
from tests.worlds import SCHEMA, row

CONFIG = persist.Config(format=4, timeout_s=5)
ADMIN, LOADER, VIEWER, KEEPER = (f"{name}-0123456789abcdefghij" for name in ("admin", "loader", "viewer", "keeper"))
TOKENS = f"""
[clients.admin]
token = "{ADMIN}"
rights = {{ "*" = ["read", "append", "maintain"] }}

[clients.loader]
sha256 = "{sha256(LOADER.encode()).hexdigest()}"
rights = {{ "orders.*" = ["append"], "prices" = ["read"] }}

[clients.viewer]
token = "{VIEWER}"
rights = {{ "orders.*" = ["read"] }}

[clients.keeper]
token = "{KEEPER}"
rights = {{ "orders.*" = ["maintain"] }}
"""


def replaced(path: Path, text: str) -> None:
    """The file with another text, as a careful program replaces it."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


class Guarded(Site):
    """With a server that knows clients by their tokens."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, config=CONFIG)
        self.file = folder / "tokens.toml"
        self.file.write_text(TOKENS)
        self.serve(token_file=self.file)
        self.patch = pytest.MonkeyPatch()

    def by(self, token: str | None) -> persist.Client:
        if token is None:
            self.patch.delenv("PERSIST_TOKEN", raising=False)
        else:
            self.patch.setenv("PERSIST_TOKEN", token)
        return self.client()

    def consensus(self, token: str) -> RpcConsensus:
        credentials = Credentials(None, {"PERSIST_TOKEN": token})
        self.made.append(RpcConsensus(Servers([f"127.0.0.1:{self.server.port}"], Runtime(), credentials)))
        return self.made[-1]

    def close(self) -> None:
        super().close()
        self.patch.undo()


site = site_of(Guarded)


@pytest.mark.parametrize(
    "token", [None, "unknown-0123456789abcdef", LOADER[:-1], LOADER + "x", sha256(LOADER.encode()).hexdigest()]
)
def test_a_client_without_a_known_token_is_refused_before_anything_happens(site: Guarded, token: str | None) -> None:
    with pytest.raises(NotAuthenticated, match=r"Nothing was done\. Set PERSIST_TOKEN"):
        site.by(token)
    assert not list(site.store.consensus.list_keys())


def test_every_call_asks_for_the_token(site: Guarded) -> None:
    servers = Servers([f"127.0.0.1:{site.server.port}"], Runtime(), Credentials(None, {}))
    for name in ("now", "head", "scan", "compare_and_set", "compare_and_set_many", "truncate", "rewind", "list_keys",
                 "heads", "commit", "debts", "losing"):  # fmt: skip
        with pytest.raises(NotAuthenticated):
            servers.call(name, None, object, route="", seconds=5, reads=True)
    servers.close()


def test_the_library_works_with_the_rights_that_it_needs_and_the_log_shows_who_did_it(site: Guarded) -> None:
    with site.by(LOADER).open_writer("orders.eu", SCHEMA) as write:
        for n in range(20):
            write.compare_and_append([row(n, time=n)], n, n + 1)
    with site.by(VIEWER).open_reader("orders.eu") as read:
        assert read.snapshot(19).to_arrow().num_rows == 20
    keeper = site.by(KEEPER)
    keeper.maintain("orders.eu")
    keeper.set_retention("orders.eu", 5)
    assert keeper.shards() == ["orders.eu"]


def test_the_log_shows_the_names_of_clients(site: Guarded) -> None:
    site.store.open_writer("orders.eu", SCHEMA).close()
    sent: list[tuple[str, c.Command]] = [
        (LOADER, c.RegisterWriter(format_writer_id(9), "ingest", 60_000)),
        (KEEPER, c.SetRetention(5)),
        (VIEWER, c.SetHold("viewer", MINIMUM, None, b"")),
    ]
    funnel = site.server._funnels.funnel(ShardId("orders.eu"))
    with ThreadPoolExecutor(3) as pool, funnel.machine.turn:  # so that all of them wait for the same turn
        for token, command in sent:
            pool.submit(_commit, site.consensus(token), "orders.eu", command, token.encode()[:9])
        for _ in range(2000):
            if sum(funnel.queue._all.values()) == 3:
                break
            time.sleep(0.005)
    group = fetch_rows(site.store, "orders.eu", None, 100)[-1]
    told = {(one["sender"], one["command"]) for one in group["commands"]}
    assert told == {("loader", "RegisterWriter"), ("keeper", "SetRetention"), ("viewer", "SetHold")}


FORBIDDEN: list[tuple[str, Callable[[RpcConsensus], object]]] = [
    (VIEWER, lambda rpc: _commit(rpc, "orders.eu", c.RegisterWriter(format_writer_id(1), "ingest", 1000))),
    (KEEPER, lambda rpc: _commit(rpc, "orders.eu", c.RegisterReader(format_reader_id(1), 1000))),
    (LOADER, lambda rpc: _commit(rpc, "orders.eu", c.Expire(2**40))),
    (LOADER, lambda rpc: _commit(rpc, "orders.eu", c.Finish())),
    (LOADER, lambda rpc: _commit(rpc, "orders", c.Create(SCHEMA))),
    (LOADER, lambda rpc: _commit(rpc, "prices", c.Create(SCHEMA))),
    (LOADER, lambda rpc: _commit(rpc, "prices2", c.Create(SCHEMA))),
    (LOADER, lambda rpc: _commit(rpc, "Orders.eu", c.Create(SCHEMA))),
    (VIEWER, lambda rpc: _commit(rpc, "orders.eu", c.Retire(format_writer_id(1)))),
    (LOADER, lambda rpc: rpc.head("other")),
    (LOADER, lambda rpc: rpc.scan("other", SeqNo(0), 10)),
    (LOADER, lambda rpc: rpc.compare_and_set("orders.eu", None, b"x")),
    (KEEPER, lambda rpc: rpc.compare_and_set_many({"orders.eu": (None, b"x")})),
    (VIEWER, lambda rpc: rpc.truncate("orders.eu", SeqNo(1))),
    (KEEPER, lambda rpc: rpc.rewind("orders.eu", SeqNo(1), Newest(SeqNo(2), b"x"))),
]


def _commit(rpc: RpcConsensus, shard: str, command: c.Command, token: bytes = b"t") -> object:
    return rpc.commit_commands([Proposed(shard, command, SeqNo(0))], token, 5, is_repeated=False, heart=Heart)


@pytest.mark.parametrize(("token", "call"), FORBIDDEN)
def test_what_a_client_has_no_right_to_is_refused_before_anything_happens(
    site: Guarded, token: str, call: Callable[[RpcConsensus], object]
) -> None:
    with site.store.open_writer("orders.eu", SCHEMA) as write:
        write.append_now([row(1)])
        before = site.store.consensus.heads()
        with pytest.raises(NotAllowed, match=r"lacks the right to .*did nothing") as told:
            call(site.consensus(token))
        assert site.store.consensus.heads() == before
    assert told.value.client in token
    assert told.value.shard
    assert told.value.needs


CASES = every_command_with_its_rights()
ALONE = {"read": "r", "append": "a", "maintain": "m"}


def test_each_command_is_served_with_exactly_the_rights_that_it_needs(site: Guarded) -> None:
    """Each of the three rights alone, and every command: refused before anything happens, or passed to the shard."""
    tokens = {name: f"{name}-only-0123456789abcdefghij" for name in ALONE}
    clients = [
        f'[clients.{name}]\ntoken = "{token}"\nrights = {{ "*" = ["{name}"] }}\nholds = ["mine"]\n'
        for name, token in tokens.items()
    ]
    replaced(site.file, TOKENS + "".join(clients))
    with site.store.open_writer("orders.eu", SCHEMA) as write:
        write.append_now([row(1)])
    for right, letter in ALONE.items():
        rpc = site.consensus(tokens[right])
        # What ends the shard comes last.
        for name, command, allowed in sorted(CASES, key=lambda case: case[0] == "finish"):
            may = nullcontext() if letter in allowed.split("|") else pytest.raises(NotAllowed, match=right)
            with may:
                _commit(rpc, "orders.eu", command, name.encode())


def test_a_client_that_only_reads_owns_its_holds_and_no_others(site: Guarded) -> None:
    replaced(site.file, TOKENS.replace('rights = { "orders.*" = ["read"] }', 'rights = { "*" = ["read"] }'))
    with site.store.open_writer("orders.eu", SCHEMA) as write:
        write.append_now([row(1)])
    site.store.set_hold("orders.eu", "audit", 0, opaque=b"x")
    with streams.open(site.store) as runtime:
        viewer = site.by(VIEWER)
        viewer.set_hold("orders.eu", "viewer", 0)
        viewer.release_hold("orders.eu", "viewer")
        for act in (
            lambda: viewer.release_hold("orders.eu", "audit"),
            lambda: viewer.downgrade_hold("orders.eu", "audit", 0, opaque=b"y"),
            lambda: viewer.set_hold("orders.eu", "audit", 0, opaque=b"y"),
            lambda: viewer.set_hold("orders.eu", "other", 0),
            lambda: break_lock(viewer),
        ):
            with pytest.raises(NotAllowed, match=r"is not its own|lacks the right"):
                act()
        held = fetch_lock(site.store)
        assert held is not None
        assert runtime.epoch == held.epoch
    assert site.store.inspect("orders.eu").state.holds["audit"].opaque == b"x"


def test_of_a_commit_of_several_shards_nothing_is_done_if_one_is_forbidden(site: Guarded) -> None:
    rpc = site.consensus(LOADER)
    both = [Proposed("orders.a", c.Create(SCHEMA), SeqNo(0)), Proposed("prices", c.Create(SCHEMA), SeqNo(0))]
    for proposed in (both, both[::-1]):
        with pytest.raises(NotAllowed):
            rpc.commit_commands(proposed, b"t", 5, is_repeated=False, heart=Heart)
    with pytest.raises(NotAllowed):
        rpc.compare_and_set_many({"orders.a": (None, b"x"), "prices": (None, b"x")})
    assert not site.store.consensus.heads()


def test_a_client_sees_the_names_of_its_own_shards_only(site: Guarded) -> None:
    for name in ("orders.a", "prices", "salaries"):
        site.store.open_writer(name, SCHEMA).close()
    rpc = site.consensus(LOADER)
    assert sorted(rpc.list_keys()) == sorted(rpc.heads()) == ["orders.a", "prices"]
    assert sorted(site.consensus(ADMIN).list_keys()) == ["orders.a", "prices", "salaries"]


def test_a_changed_token_file_counts_at_once_and_a_broken_one_changes_nothing(
    site: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    rpc = site.consensus(VIEWER)
    fresh = "fresh-0123456789abcdefghij"
    replaced(site.file, TOKENS.replace(VIEWER, fresh))
    with pytest.raises(NotAuthenticated):
        rpc.heads()
    again = site.consensus(fresh)
    assert again.heads() == {}
    with caplog.at_level(logging.WARNING, logger="persist"):
        for text in (f"[clients.x]\ntoken = {fresh!r} broken", "", f"[clients.x]\ntoken = '{fresh}'\n"):
            replaced(site.file, text)
            again.heads()
        site.file.unlink()
        again.heads()
    assert caplog.text.count("stays in force") == 4
    assert fresh not in caplog.text
    replaced(site.file, TOKENS.replace(VIEWER, fresh).replace('["read"] }', "[] }"))
    with pytest.raises(NotAllowed):
        again.head("orders.a")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "at least one"),
        ("x = 1", "at least one"),
        ("[clients]", "at least one"),
        (f"other = 1\n{TOKENS}", "nothing else"),
        (f'[clients.a]\ntoken = "{ADMIN}"', "must have rights"),
        ("[clients.a]\nrights = {}", "sha256 or token"),
        (f'[clients.a]\ntoken = "{ADMIN}"\nsha256 = "x"\nrights = {{}}', "sha256 or token"),
        (f'[clients.a]\ntokn = "{ADMIN}"\nrights = {{}}', "sha256 or token"),
        ('[clients.a]\ntoken = "short"\nrights = {}', "20 to 512"),
        ("[clients.a]\ntoken = 12345678901234567890\nrights = {}", "20 to 512"),
        (f'[clients.a]\nsha256 = "{ADMIN}"\nrights = {{}}', "64 hex digits"),
        (f'[clients."a b"]\ntoken = "{ADMIN}"\nrights = {{}}', "client's name"),
        (f'[clients.a]\ntoken = "{ADMIN}"\nrights = ["read"]', "rights by shard"),
        (f'[clients.a]\ntoken = "{ADMIN}"\nrights = {{ "" = ["read"] }}', "name a shard"),
        (f'[clients.a]\ntoken = "{ADMIN}"\nrights = {{ "a*b" = ["read"] }}', "name a shard"),
        (f'[clients.a]\ntoken = "{ADMIN}"\nrights = {{ "*" = ["write"] }}', "read, append, maintain"),
        (f'[clients.a]\ntoken = "{ADMIN}"\nrights = {{}}\nholds = "a"', "as holds a list"),
        (f'[clients.a]\ntoken = "{ADMIN}"\nrights = {{}}\nholds = ["a*b"]', "as holds a list"),
        (f'[clients.a]\ntoken = "{ADMIN}"\nrights = {{ "*" = "read" }}', "read, append, maintain"),
        (f'[clients.a]\ntoken = "{ADMIN}"\nrights = {{ "*" = [["read"]] }}', "read, append, maintain"),
        (TOKENS.replace(VIEWER, LOADER), "has the token of loader"),
        (TOKENS + "\xff[", "no TOML"),
    ],
)
def test_a_token_file_that_is_wrong_is_refused_without_its_tokens(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    with pytest.raises(InvalidUsage, match=says) as told:
        Access(path)
    for token in (ADMIN, LOADER, VIEWER, KEEPER):
        assert token not in str(told.value) + repr(told.value.fields)
    path.unlink()
    with pytest.raises(InvalidUsage, match="cannot be read"):
        Access(path)


def test_the_token_is_taken_from_a_file_that_the_url_names_and_read_anew(site: Guarded, tmp_path: Path) -> None:
    held = tmp_path / "my token"
    held.write_text("wrong-0123456789abcdefghij\n")
    url = f"{site.served()}?credentials={held}"
    with pytest.raises(NotAuthenticated):
        persist.open(site.url, consensus=url)
    replaced(held, LOADER + "\n")
    with persist.open(site.url, consensus=url) as client:
        write = client.open_writer("orders.eu", SCHEMA)
        write.append_now([row(1)])
        replaced(held, ADMIN)
        client.set_retention("orders.eu", 3)
        for shown in (repr(client), repr(client.consensus), client.url, repr(vars(client.consensus))):
            assert not {ADMIN, LOADER} & set(shown.split("'"))
            assert ADMIN not in shown
        write.close()


def test_a_relative_file_means_the_same_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = canonical("persist://a:1,b:2?credentials=secrets/t")
    assert told == f"persist://a:1,b:2?credentials={tmp_path}/secrets/t"
    monkeypatch.chdir("/")
    assert canonical(told) == told


@pytest.mark.parametrize("url", [f"?token={ADMIN}", f"?password={ADMIN}", f"?x=1&secret={ADMIN}"])
def test_a_token_in_a_url_is_refused_and_not_repeated(tmp_path: Path, url: str) -> None:
    for consensus in (f"persist://127.0.0.1:1{url}", f"persist://{ADMIN}@127.0.0.1:1", f"persist://a:{ADMIN}@h:1"):
        with pytest.raises(InvalidUsage, match="never goes into the URL") as told:
            persist.open(f"file:{tmp_path}/x", consensus=consensus)
        assert ADMIN not in str(told.value)


@pytest.mark.parametrize("options", ["?", "?x", "?tls=1", "?credentials=", "?credentials=/a&credentials=/b"])
def test_options_that_are_none_are_refused(tmp_path: Path, options: str) -> None:
    if options == "?":
        assert canonical(f"persist://a:1{options}") == "persist://a:1"
        return
    with pytest.raises(InvalidUsage, match="the options of shard servers"):
        persist.open(f"file:{tmp_path}/x", consensus=f"persist://127.0.0.1:1{options}")


@pytest.mark.parametrize("token", ["short", "with space 0123456789abcdef", "é" * 30, "x" * 513, "a\nb" * 10])
def test_what_can_be_no_token_is_refused_and_not_repeated(tmp_path: Path, token: str) -> None:
    with pytest.raises(InvalidUsage, match="PERSIST_TOKEN must hold a token") as told:
        Credentials(None, {"PERSIST_TOKEN": token})
    assert token not in str(told.value)
    (tmp_path / "t").write_text(token)
    with pytest.raises(InvalidUsage, match="must hold a token"):
        Credentials(str(tmp_path / "t"), {})
    with pytest.raises(InvalidUsage, match="is empty"):
        Credentials(None, {"PERSIST_TOKEN": " "})


def test_a_token_is_not_sent_to_another_machine_in_the_clear() -> None:
    known = Credentials(None, {"PERSIST_TOKEN": ADMIN})
    assert ADMIN not in repr(known)
    check_secret(["127.0.0.1:1", "localhost:2", "[::1]:3"], known)
    check_secret(["example.org:1"], Credentials(None, {}))
    for address in ("example.org:1", "10.0.0.1:1", "localhost.example.org:1"):
        with pytest.raises(InvalidUsage, match=r"unencrypted\. Nothing was sent"):
            check_secret(["127.0.0.1:1", address], known)


class Refusing(Servers):
    """Servers that refuse at the door, or are not there."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(["127.0.0.1:1"], Runtime(), Credentials(None, {}))
        self._errors: list[Exception | None] = [None, *errors]

    def call(self, *_: object, **__: object) -> Any:
        error = self._errors.pop(0) if len(self._errors) > 1 else self._errors[0]
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [NotAuthenticated("no"), NotAllowed("no"), Determinate("cannot be reached")])
def test_a_refusal_at_the_door_says_nothing_about_what_was_sent_before(error: persist.PersistError) -> None:
    """A server may have committed it before the token was withdrawn, or before it went away."""
    proposed, deadline = [Proposed("s", c.Finish(), SeqNo(0))], Runtime().deadline(0.1)
    with pytest.raises(Indeterminate) as told:
        until_answered(RpcConsensus(Refusing(Indeterminate("lost"), error)), proposed, b"t", deadline)
    assert told.value.token == b"t"
    with pytest.raises(type(error)):
        until_answered(RpcConsensus(Refusing(error)), proposed, b"t", deadline)


def test_requests_of_one_client_count_together_over_all_its_connections(site: Guarded) -> None:
    seen: list[str] = []
    submit = site.server._funnels.submit
    site.server._funnels.submit = lambda request: (seen.append(request.client), submit(request))[1]  # type: ignore[func-returns-value]
    for n in range(3):
        rpc = site.consensus(ADMIN)
        _commit(rpc, f"s{n}", c.Create(SCHEMA))
    assert seen == ["admin"] * 3


MORE = """
[clients.owner]
token = "owner-0123456789abcdefghij"
tables = { "orders" = ["read", "append", "maintain"] }
rights = { "_catalog" = ["read", "append", "maintain"] }

[clients.member]
token = "member-0123456789abcdefghij"
tables = { "orders" = ["read", "append"] }

[clients.stranger]
token = "stranger-0123456789abcdefghij"
tables = { "sales*" = ["read", "append", "maintain"] }

[clients.byname]
token = "byname-0123456789abcdefghij"
rights = { "orders" = ["read", "append"] }
"""
CLOCK = persist.Schema(SCHEMA.key, SCHEMA.value, times="ms")


def test_rights_by_a_tables_name_are_on_all_of_its_shards_before_and_after_it_is_promoted(site: Guarded) -> None:
    replaced(site.file, TOKENS + MORE)
    store = site.store.table("orders", CLOCK)
    store.append([row(1)])
    site.store.upgrade("orders")
    site.store.controller().create("apart", CLOCK)
    owner = site.by("owner-0123456789abcdefghij").table("orders")
    member = site.by("member-0123456789abcdefghij").table("orders")
    stranger = site.by("stranger-0123456789abcdefghij")
    member.append([row(2)])
    for dry_run in (True, False):
        with pytest.raises(InvalidUsage, match=r"names of shards: byname\. .*tables = .*losing=\['byname'\]"):
            owner.promote(dry_run=dry_run)
    assert site.store.inspect("orders").state.member == ""
    with pytest.raises(NotAllowed):
        member.promote()
    assert not any(one.what == "promote" for one in site.store.controller().catalog.fetch().commands.values())
    assert owner.promote(losing=["byname"]).carrier == "collection"
    member.append([row(3)])
    assert sorted(one["id"] for one in member.read().to_pylist()) == [1, 2, 3]
    assert owner.promote(shards=2).carrier == "collection"
    member.append([row(4)])
    assert member.count() == store.count() == 4
    places = [*site.store.table("orders").describe().shards, store.kept_by()]
    for name in ("orders", *places):
        with pytest.raises(NotAllowed):
            stranger.inspect(name)
    with pytest.raises(NotAllowed, match="lacks the right"):
        stranger.table("orders").read()
    with pytest.raises(NotAllowed):
        site.by("byname-0123456789abcdefghij").table("orders").read()
    for one in site.made:  # while they may retire their ids
        one.close()
    stranger = site.by("stranger-0123456789abcdefghij")
    store.rename("sales/2026")
    time.sleep(1.1)
    assert stranger.table("sales/2026").count() == 4
    with pytest.raises(NotAllowed):
        site.by("member-0123456789abcdefghij").inspect(places[0])
    site.store.controller().create("orders", CLOCK, mode="compare_and_append")
    site.store.table("orders").append([row(7)])
    again = site.by("member-0123456789abcdefghij").table("orders")
    again.append([row(8)])
    assert sorted(one["id"] for one in again.read().to_pylist()) == [7, 8]


def test_what_tables_share_takes_rights_on_each_of_them(site: Guarded) -> None:
    replaced(site.file, TOKENS + MORE)
    site.store.table("orders", CLOCK).append([row(1)])
    site.store.upgrade("orders")
    tables = site.store.controller().tables()
    tables.create("sales", CLOCK, timeline="shop", mode="wal")
    tables.insert("sales", [row(1)])
    stranger = site.by("stranger-0123456789abcdefghij").table("sales")
    assert stranger.count() == 1
    owner = site.by("owner-0123456789abcdefghij").table("orders")
    with pytest.raises(InvalidUsage, match="names of shards: byname, member, owner, stranger"):
        owner.promote(timeline="shop")
    assert site.store.table("orders").promote(timeline="shop").carrier == "timeline 'shop'"
    time.sleep(1.1)
    with pytest.raises(NotAllowed):
        stranger.append([row(2)])
    replaced(site.file, (TOKENS + MORE).replace('"sales*" =', '"orders" = ["read", "append"], "sales*" ='))
    stranger.append([row(2)])
    assert stranger.count() == 2


def test_the_deleted_keys_of_a_table_are_that_tables(site: Guarded) -> None:
    replaced(site.file, TOKENS + MORE)
    tables = site.store.controller().tables()
    ordered = persist.Schema(CLOCK.key, [*CLOCK.value, *persist.Schema({"seq": "int64"}).key], times="ms", unique=True)
    tables.create("orders", ordered, timeline="shop", mode="wal")
    owner = site.by("owner-0123456789abcdefghij").table("orders")
    member = site.by("member-0123456789abcdefghij").table("orders")
    member.append([row(1) | {"seq": 1}])
    with pytest.raises(NotAllowed):
        member.set_keep_deletes("seq", "1 day")
    owner.set_keep_deletes("seq", "1 day")
    time.sleep(1.1)
    assert member.apply(deletes=[{"id": 1, "seq": 9}, {"id": 2, "seq": 9}]).deleted == 1
    assert owner.apply([row(1) | {"seq": 8}, row(2) | {"seq": 10}]).late == 1
    kept = owner.describe().keep_deletes
    assert kept is not None
    assert member.count() == member._carrier.client.table(kept.table).count() == 1
    with pytest.raises(NotAllowed):
        site.by("stranger-0123456789abcdefghij").table(kept.table).read()


def test_one_client_gets_a_part_and_all_together_the_whole() -> None:
    load = Load(10, 4, 1000, 500)
    load.take("a", 4, 100)
    with pytest.raises(Overloaded):
        load.take("a", 1, 1)
    load.take("b", 3, 500)
    with pytest.raises(Overloaded):
        load.take("b", 1, 1)
    load.take("c", 3, 100)
    with pytest.raises(Overloaded):
        load.take("d", 1, 0)
    assert (load.commands, load.bytes, load.clients) == (10, 700, 3)
    load.give_back("a", 4, 100)
    load.take("d", 1, 400)
    with pytest.raises(Overloaded):
        load.take("e", 1, 1)
    for client, commands, size in (("b", 3, 500), ("c", 3, 100), ("d", 1, 400)):
        load.give_back(client, commands, size)
    assert (load.commands, load.bytes, load.clients) == (0, 0, 0)


def test_a_message_of_the_largest_size_fits() -> None:
    assert wire.MOST_BYTES <= BYTES_OF_A_CLIENT < BYTES_MOST
    Load().take("a", 1, wire.MOST_BYTES)


class Bounded(Site):
    """A server whose turns wait for `gate`, with small bounds."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for n in range(12):
            self.store.open_writer(f"s{n}", SCHEMA).close()
        self.gate, self.pool, tokens = threading.Event(), ThreadPoolExecutor(32), folder / "tokens.toml"
        rights = 'rights = { "*" = ["append", "read"] }\nholds = ["h"]'
        tokens.write_text("\n".join(f'[clients.{name}]\ntoken = "{name * 20}"\n{rights}' for name in "abc"))
        consensus = self.serve(token_file=tokens)._funnels._make.args[1]
        append = consensus.compare_and_set
        consensus.compare_and_set = lambda *args: (self.gate.wait(60), append(*args))[1]
        self.server._calls.load = Load(8, 4)

    def by(self, name: str) -> RpcConsensus:
        token = self.folder / name
        token.write_text(name * 20)
        made = RpcConsensus(Servers([f"127.0.0.1:{self.server.port}"], Runtime(), Credentials(str(token))))
        self.made.append(made)
        return made

    def hold(self, rpc: RpcConsensus, shard: str) -> Any:
        command = c.SetHold("h", persist.frontier.MINIMUM, None, b"x")
        return self.pool.submit(
            rpc.commit_commands, [Proposed(shard, command, SeqNo(0))], b"t", 30, is_repeated=False, heart=Heart
        )

    def close(self) -> None:
        self.gate.set()
        self.pool.shutdown()
        super().close()


bounded = site_of(Bounded)


def _wait(bounded: Bounded, count: int) -> None:
    for _ in range(3000):
        if bounded.server._calls.load.commands == count:
            return
        threading.Event().wait(0.01)
    raise AssertionError(bounded.server._calls.load.commands)


def test_a_client_with_many_shards_does_not_fill_the_server(bounded: Bounded) -> None:
    one, two, three = map(bounded.by, "abc")
    first = [bounded.hold(one, f"s{n}") for n in range(4)]
    _wait(bounded, 4)
    with pytest.raises(Overloaded, match="of a are"):
        bounded.hold(one, "s9").result(30)
    second = [bounded.hold(two, f"s{n}") for n in range(4, 8)]
    _wait(bounded, 8)
    with pytest.raises(Overloaded, match="all clients"):
        bounded.hold(three, "s9").result(30)
    beat = [Proposed("s0", c.Heartbeat((), 1000), SeqNo(0))]
    answered = bounded.pool.submit(three.commit_commands, beat, b"b", 30, is_repeated=False, heart=Heart)
    _wait(bounded, 8)
    bounded.gate.set()
    assert all(request.result(30)[0].is_committed for request in [*first, *second])
    answered.result(30)
    _wait(bounded, 0)
    assert bounded.hold(three, "s9").result(30)[0].is_committed
