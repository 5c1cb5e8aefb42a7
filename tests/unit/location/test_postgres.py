"""Consensus on PostgreSQL: every order of two transactions, one round trip, nothing left behind, what errors mean."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import product
from typing import Any

import psycopg
import pytest

from persist_lib.errors import (
    Corrupt,
    Determinate,
    Indeterminate,
    InvalidUsage,
    NewerFormat,
    NotFound,
    PersistError,
)
from persist_lib.ids import SeqNo
from persist_lib.location import open_location, scheme
from persist_lib.location.api import Row
from persist_lib.location.postgres import connection, layout
from persist_lib.location.postgres import sessions as postgres_sessions
from persist_lib.location.postgres.consensus import PostgresConsensus, canonical, parse_url
from persist_lib.location.postgres.sessions import MOST_PREPARED, PREPARED_AFTER
from persist_lib.location.wrap.deadline import within
from persist_lib.runtime.ambient import Runtime
from tests import servers
from tests.faults.proxy import Fault, Proxy
from tests.logs import after

pytestmark = pytest.mark.slow

LOCK_MS = "5000"


@pytest.fixture
def schema() -> str:
    return f"t{os.urandom(8).hex()}"


@pytest.fixture
def url(schema: str) -> str:
    found = servers.postgres_url()
    return f"{found}{'&' if '?' in found else '?'}persist_schema={schema}"


@pytest.fixture
def consensus(url: str) -> Iterator[PostgresConsensus]:
    opened = PostgresConsensus(url)
    yield opened
    opened.close()


@pytest.fixture
def sql() -> Iterator[psycopg.Connection]:
    with psycopg.connect(servers.postgres_url(), autocommit=True) as connection:
        yield connection


class Transaction:
    """One that a test ends when it wants to, with the very statements that the library sends by themselves."""

    def __init__(self, schema: str, isolation: str = "READ COMMITTED") -> None:
        self.connection = psycopg.connect(servers.postgres_url(), autocommit=True, cursor_factory=psycopg.RawCursor)
        self.connection.execute(f"BEGIN ISOLATION LEVEL {isolation}".encode())
        self.connection.execute(b"SELECT 1")
        self.schema = schema
        self.pool = ThreadPoolExecutor(1)

    def append(self, expected: int | None, data: bytes, key: str = "s") -> Any:
        values: list[object] = [LOCK_MS, key, data]
        text = layout.CREATE if expected is None else layout.APPEND
        return self.run(text, values if expected is None else [*values, expected, b""])

    def many(self, changes: dict[str, int | None], data: bytes) -> Any:
        values: list[object] = [LOCK_MS]
        for key, expected in sorted(changes.items()):
            values += [key, expected, b"", data]
        return self.run(layout.append_many(len(changes)), values)

    def truncate(self, seqno: int) -> Any:
        return self.run(layout.TRUNCATE, ["s", seqno])

    def run(self, text: str, values: list[object]) -> Any:
        """`values` without the request's id."""
        filled = layout.filled(text, self.schema).encode()
        return self.pool.submit(lambda: self.connection.execute(filled, [*values, 7]).fetchone())

    def end(self, how: str) -> None:
        self.pool.submit(lambda: self.connection.execute(how.encode())).result(10)
        self.connection.close()
        self.pool.shutdown()


def fill(consensus: PostgresConsensus, rows: int, key: str = "s") -> None:
    for n in range(rows):
        assert consensus.compare_and_set(key, after(n), f"{key}{n + 1}".encode())


@pytest.mark.parametrize(("rows", "first_ends"), [*product([0, 3], ["COMMIT", "ROLLBACK"])])
def test_of_two_appends_in_flight_the_second_waits_and_wins_only_if_the_first_is_rolled_back(
    consensus: PostgresConsensus, schema: str, rows: int, first_ends: str
) -> None:
    fill(consensus, rows)
    expected = rows or None
    first, second = Transaction(schema), Transaction(schema)
    assert first.append(expected, b"first").result(10)[0] == 1
    waiting = second.append(expected, b"second")
    with pytest.raises(TimeoutError):
        waiting.result(0.1)
    first.end(first_ends)
    assert waiting.result(10)[0] == (0 if first_ends == "COMMIT" else 1)
    second.end("COMMIT")
    assert consensus.scan("s", SeqNo(rows + 1), 9) == [
        Row(SeqNo(rows + 1), b"first" if first_ends == "COMMIT" else b"second")
    ]


@pytest.mark.parametrize("ends", [*product(["COMMIT", "ROLLBACK"], repeat=2)])
@pytest.mark.parametrize("truncates_first", [True, False])
def test_no_order_of_append_and_truncation_frees_a_row_or_loses_one(
    consensus: PostgresConsensus, schema: str, ends: tuple[str, str], truncates_first: bool
) -> None:
    fill(consensus, 3)
    appending, truncating = Transaction(schema), Transaction(schema)
    acts: list[Callable[[], Any]] = [lambda: appending.append(3, b"s4"), lambda: truncating.truncate(3)]
    for act in reversed(acts) if truncates_first else acts:
        act().result(10)
    appending.end(ends[0])
    truncating.end(ends[1])
    first = 3 if ends[1] == "COMMIT" else 1
    last = 4 if ends[0] == "COMMIT" else 3
    assert [row.seqno for row in consensus.scan("s", SeqNo(0), 99)] == [*range(first, last + 1)]
    for stale in (None, 1, 2, last - 1):
        assert not consensus.compare_and_set("s", after(stale or 0), b"stale")
    assert consensus.compare_and_set("s", after(last), b"next")


def test_a_creation_in_flight_beside_an_append_and_a_truncation_of_the_same_key(
    consensus: PostgresConsensus, schema: str
) -> None:
    """The first row is created, appended to, and truncated away, while another creation is on its way."""
    first, late = Transaction(schema), Transaction(schema)
    assert first.append(None, b"s1").result(10)[0] == 1
    waiting = late.append(None, b"late")
    first.end("COMMIT")
    fill_on = consensus.compare_and_set("s", after(1), b"s2")
    assert fill_on
    assert consensus.truncate("s", SeqNo(2)) == 1
    assert waiting.result(10)[0] == 0
    late.end("COMMIT")
    assert consensus.scan("s", SeqNo(0), 9) == [Row(SeqNo(2), b"s2")]


@pytest.mark.parametrize("existing", [["a", "b"], ["a"], ["b"], []])
@pytest.mark.parametrize("ends", ["COMMIT", "ROLLBACK"])
def test_many_are_all_or_none_also_against_one_in_flight(
    consensus: PostgresConsensus, schema: str, existing: list[str], ends: str
) -> None:
    for key in existing:
        fill(consensus, 1, key)
    expected = {key: (1 if key in existing else None) for key in ("a", "b")}
    one, many = Transaction(schema), Transaction(schema)
    assert one.append(expected["b"], b"one", "b").result(10)[0] == 1
    waiting = many.many(expected, b"many")
    with pytest.raises(TimeoutError):
        waiting.result(0.1)
    one.end(ends)
    if ends == "ROLLBACK":
        assert waiting.result(10)[0] == 1
        many.end("COMMIT")
        assert [consensus.head(key) for key in "ab"] == [Row(SeqNo((expected[k] or 0) + 1), b"many") for k in "ab"]
        return
    try:
        assert waiting.result(10)[0] == 0
    except psycopg.errors.DivisionByZero:
        assert "b" not in existing
    many.end("ROLLBACK")
    assert consensus.head("a") == (Row(SeqNo(1), b"a1") if "a" in existing else None)
    assert consensus.head("b") == Row(SeqNo((expected["b"] or 0) + 1), b"one")


def test_a_creation_that_is_beaten_while_many_are_set_is_a_lost_race_and_no_error(
    consensus: PostgresConsensus, schema: str
) -> None:
    fill(consensus, 1, "a")
    other = Transaction(schema)
    other.append(None, b"other", "b").result(10)
    with ThreadPoolExecutor(1) as pool:
        racing = pool.submit(consensus.compare_and_set_many, {"a": (after(1), b"!"), "b": (None, b"!")})
        with pytest.raises(TimeoutError):
            racing.result(0.1)
        other.end("COMMIT")
        assert racing.result(10) is False
    assert consensus.head("a") == Row(SeqNo(1), b"a1")


def test_many_in_opposite_orders_never_deadlock(consensus: PostgresConsensus) -> None:
    def run(keys: str) -> int:
        wins = 0
        for n in range(40):
            heads = {key: consensus.head(key) for key in keys}
            changes = {key: (head and head.newest, b"%d" % n) for key, head in heads.items()}
            wins += consensus.compare_and_set_many(changes)
        return wins

    with ThreadPoolExecutor(4) as pool:
        wins = sum(pool.map(run, ["abc", "cba", "bca", "acb"]))
    assert [len(consensus.scan(key, SeqNo(0), 999)) for key in "abc"] == [wins] * 3


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_under_a_stricter_isolation_the_loser_is_told_so_or_fails_determinately(
    consensus: PostgresConsensus, schema: str, isolation: str
) -> None:
    fill(consensus, 1)
    first, second = Transaction(schema, isolation), Transaction(schema, isolation)
    first.append(1, b"first").result(10)
    waiting = second.append(1, b"second")
    first.end("COMMIT")
    with pytest.raises(psycopg.errors.SerializationFailure):
        waiting.result(10)
    second.end("ROLLBACK")
    assert consensus.head("s") == Row(SeqNo(2), b"first")


def test_the_checks_above_see_that_the_naive_form_has_two_winners(consensus: PostgresConsensus, schema: str) -> None:
    """`INSERT … WHERE max = n` acknowledges a second winner when truncation frees the slot of the first."""
    fill(consensus, 2)
    naive = (
        f"INSERT INTO {schema}.shard_log SELECT 's', 3, $1::bytea "
        f"WHERE (SELECT max(seqno) FROM {schema}.shard_log WHERE key = 's') = 2 AND $2::int8 = 7 RETURNING 1"
    )
    late = Transaction(schema, "REPEATABLE READ")
    late.run(f"SELECT count(*) FROM {schema}.shard_log WHERE $1::int8 = 7", []).result(10)
    winner = Transaction(schema)
    assert winner.run(naive, [b"winner"]).result(10) == (1,)
    winner.end("COMMIT")
    with psycopg.connect(servers.postgres_url(), autocommit=True) as sql:
        sql.execute(f"INSERT INTO {schema}.shard_log VALUES ('s', 4, '')".encode())
        sql.execute(f"DELETE FROM {schema}.shard_log WHERE seqno < 4".encode())
    assert late.run(naive, [b"late"]).result(10) == (1,)
    late.end("COMMIT")


def test_each_operation_is_one_round_trip_and_now_is_none(consensus: PostgresConsensus, url: str) -> None:
    with Proxy(port_of(url)) as proxy:
        through = PostgresConsensus(through_proxy(url, proxy))
        through.head("s")
        operations: list[Callable[[], object]] = [
            lambda: through.compare_and_set("s", None, b"x"),
            lambda: through.compare_and_set("s", after(1), bytes(500_000)),
            lambda: through.compare_and_set("s", after(1), b"lost"),
            lambda: through.compare_and_set_many({"s": (after(2), b"x"), "t": (None, b"x")}),
            lambda: through.head("s"),
            lambda: through.scan("s", SeqNo(0), 9),
            lambda: through.truncate("s", SeqNo(2)),
            lambda: list(through.list_keys()),
            through.heads,
        ]
        for operation in operations:
            proxy.at(0, None)
            operation()
            assert proxy.requests == 1
        proxy.at(0, None)
        assert through.now() > 1_700_000_000_000
        assert proxy.requests == 0
        through.close()


def test_nothing_is_left_behind_in_a_connection_that_a_pooler_hands_to_somebody_else(
    consensus: PostgresConsensus,
) -> None:
    def everything(n: int) -> None:
        consensus.compare_and_set("s", after(n), b"x")
        consensus.compare_and_set("s", after(n), b"lost")
        consensus.compare_and_set_many({"s": (after(n + 1), b"x"), f"t{n}": (None, b"x")})
        consensus.scan("s", SeqNo(0), 9)
        consensus.truncate("s", SeqNo(1))

    def session_state() -> list[Any]:
        with consensus._sessions.lend(consensus._deadline()) as session:
            return [
                session._connection.execute(query).fetchall()
                for query in (
                    "SELECT name, setting FROM pg_settings WHERE source = 'session' ORDER BY name",
                    "SELECT name FROM pg_prepared_statements",
                    "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'",
                    "SELECT count(*) FROM pg_class WHERE relpersistence = 't'",
                    "SELECT * FROM pg_listening_channels()",
                )
            ]

    before = session_state()
    for n in range(0, 20, 2):
        everything(n)
    state = session_state()
    prepared = [name for (name,) in state.pop(1)]
    assert before.pop(1) == []
    assert state == before
    assert before[1:] == [[(0,)], [(0,)], []]
    assert len(prepared) == 4, "append, append of two, scan, truncate"
    assert all(re.fullmatch("persist_[0-9a-f]{40}", name) for name in prepared), "what it is, by a hash"


def test_what_is_used_often_is_prepared_and_sent_whole_again_where_that_is_lost(consensus: PostgresConsensus) -> None:
    """A pooler's other connection, or a DISCARD ALL between two clients of it, knows none of our statements."""

    def prepared() -> int:
        with consensus._sessions.lend(consensus._deadline()) as session:
            found = session._connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone()
        return int(found[0]) if found else -1

    fill(consensus, PREPARED_AFTER + 1)
    assert prepared() == 0
    seqno = PREPARED_AFTER + 1
    for _ in range(3):
        assert consensus.compare_and_set("s", after(seqno), b"x")
        assert not consensus.compare_and_set("s", after(seqno), b"lost")
        seqno += 1
    assert prepared() == 1
    with consensus._sessions.lend(consensus._deadline()) as session:
        session._connection.execute("DISCARD ALL")
    for _ in range(5):
        assert consensus.compare_and_set("s", after(seqno), b"x")
        assert not consensus.compare_and_set("s", after(seqno), b"lost")
        seqno += 1
    assert prepared() == 0, "it tries that once"
    assert [row.seqno for row in consensus.scan("s", SeqNo(0), 99)] == list(range(1, seqno + 1))
    for count in range(1, 40):
        for _ in range(PREPARED_AFTER + 2):
            consensus.compare_and_set_many({f"{count}-{n}": (after(7), b"") for n in range(count)})
    assert prepared() <= MOST_PREPARED


def test_a_commit_is_synchronous_whatever_the_role_s_default_is(
    consensus: PostgresConsensus, schema: str, sql: psycopg.Connection, url: str
) -> None:
    """A trigger at commit sees what the commit itself goes by."""
    sql.execute(
        f"""
        CREATE TABLE {schema}.seen (setting text);
        CREATE FUNCTION {schema}.note() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN INSERT INTO {schema}.seen VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER note AFTER INSERT ON {schema}.shard_log DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION {schema}.note();
        """.encode()
    )
    for weaker, seen in {"off": "on", "local": "on", "remote_apply": "remote_apply"}.items():
        asynchronous = PostgresConsensus(f"{url}&options=-csynchronous_commit%3D{weaker}")
        assert asynchronous.compare_and_set(weaker, None, b"x")
        assert asynchronous.compare_and_set_many({weaker: (after(1), b"x")})
        assert sql.execute(f"SELECT setting FROM {schema}.seen".encode()).fetchall() == [(seen,)] * 2
        sql.execute(f"DELETE FROM {schema}.seen".encode())
        asynchronous.close()


def test_an_error_at_the_commit_itself_takes_back_the_answer_that_came_before_it(
    consensus: PostgresConsensus, schema: str, sql: psycopg.Connection
) -> None:
    sql.execute(
        f"""
        CREATE FUNCTION {schema}.fail() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN RAISE EXCEPTION 'at commit' USING ERRCODE = '40001'; END $$;
        CREATE CONSTRAINT TRIGGER fail AFTER INSERT ON {schema}.shard_log DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION {schema}.fail();
        """.encode()
    )
    with pytest.raises(Determinate, match="at commit"):
        consensus.compare_and_set("s", None, b"x")
    assert consensus.head("s") is None


@pytest.mark.parametrize(
    ("sqlstate", "kind"),
    [
        ("40001", Determinate), ("40P01", Determinate), ("55P03", Determinate), ("57014", Determinate),
        ("53100", Determinate), ("53300", Determinate), ("25006", Determinate), ("40003", Indeterminate),
        ("57P01", Indeterminate), ("08006", Indeterminate), ("08P01", Indeterminate), ("58030", Indeterminate),
        ("XX000", Indeterminate), ("42501", InvalidUsage), ("23505", Corrupt), ("42P01", Corrupt),
    ],
)  # fmt: skip
def test_each_error_of_the_server_says_whether_it_happened(
    consensus: PostgresConsensus, schema: str, sql: psycopg.Connection, sqlstate: str, kind: type[PersistError]
) -> None:
    sql.execute(
        f"""
        CREATE FUNCTION {schema}.fail() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN RAISE EXCEPTION 'as planned' USING ERRCODE = '{sqlstate}'; END $$;
        CREATE TRIGGER fail BEFORE INSERT ON {schema}.shard_log FOR EACH ROW EXECUTE FUNCTION {schema}.fail();
        """.encode()
    )
    with pytest.raises(kind) as error:
        consensus.compare_and_set("s", None, b"x")
    assert type(error.value) is kind
    assert "as planned" in str(error.value)
    assert consensus.head("s") is None


def test_a_lock_that_somebody_holds_for_too_long_is_determinate_within_the_caller_s_deadline(
    consensus: PostgresConsensus, schema: str
) -> None:
    fill(consensus, 1)
    holder = Transaction(schema)
    holder.append(1, b"held").result(10)
    runtime = Runtime()
    with pytest.raises(Determinate, match="lock timeout"):
        within(runtime.deadline(0.5), lambda: consensus.compare_and_set("s", after(1), b"x"))
    holder.end("ROLLBACK")
    assert consensus.compare_and_set("s", after(1), b"x")


def test_a_killed_backend_is_indeterminate_for_a_write_determinate_for_a_read_and_then_forgotten(
    consensus: PostgresConsensus, schema: str, sql: psycopg.Connection
) -> None:
    fill(consensus, 1)
    holder = Transaction(schema)
    holder.append(1, b"held").result(10)
    kill = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        f"WHERE wait_event_type = 'Lock' AND query LIKE '%{schema}%'"
    )
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(consensus.compare_and_set, "s", after(1), b"x")
        while not sql.execute(kill.encode()).fetchall():
            pass
        with pytest.raises(Indeterminate):
            waiting.result(10)
    holder.end("ROLLBACK")
    assert consensus.compare_and_set("s", after(1), b"x")


@pytest.mark.parametrize("fault", [Fault.BLACK_HOLE, Fault.BLACK_HOLE_REPLY])
def test_opening_ends_although_an_answer_never_comes(url: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_S", 2)
    failed = []
    with Proxy(port_of(url)) as proxy:
        for strike in itertools.count(1):
            proxy.at(strike, fault)
            new = f"{through_proxy(url, proxy)}_{strike}"
            try:
                with monkeypatch.context() as patched:
                    patched.setattr(connection, "ANSWER_S", 0.3)
                    PostgresConsensus(new, create=True).close()
            except Determinate as error:
                failed.append(error.message)
            if proxy.struck == 0 and len(failed) < strike:
                break
            proxy.at(0, None)
            proxy.cut()  # or the server keeps the lock of whoever it does not know to be gone
            with closing(PostgresConsensus(new, create=True)) as again:
                assert again.heads() == {}
    unanswered = [message for message in failed if "no answer within 0.3 s" in message]
    assert len(unanswered) > 8, "each statement of the creation"
    assert all("connection timeout expired" in message for message in failed if message not in unanswered)


def test_a_connection_that_died_while_idle_is_noticed_before_anything_is_sent(
    consensus: PostgresConsensus, url: str
) -> None:
    with Proxy(port_of(url)) as proxy:
        through = PostgresConsensus(through_proxy(url, proxy))
        fill(through, 1)
        proxy.cut()
        assert through.compare_and_set("s", after(1), b"x")
        through.close()


@pytest.fixture(params=["whole", "prepared"])
def sent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many requests an append makes on a new connection: it, or its preparation and it."""
    monkeypatch.setattr(postgres_sessions, "PREPARED_AFTER", 0 if request.param == "prepared" else 10**9)
    return 2 if request.param == "prepared" else 1


def test_an_answer_cut_after_any_byte_never_acknowledges_a_write(
    consensus: PostgresConsensus, url: str, sent: int
) -> None:
    """The answer to the statement precedes its commit: believing it would acknowledge what may be rolled back."""
    fill(consensus, 1)
    with Proxy(port_of(url)) as proxy:
        through = PostgresConsensus(through_proxy(url, proxy))
        assert through.compare_and_set("s", after(1), b"x")
        proxy.at(1, None)
        assert through.compare_and_set("s", after(2), b"x")
        length = proxy.replied
        for kept in range(length):
            newest = consensus.head("s")
            assert newest is not None
            proxy.cut()
            through.head("s")
            proxy.at(sent, Fault.HALF_REPLY, keep_bytes=kept)
            with pytest.raises(Indeterminate):
                through.compare_and_set("s", newest.newest, b"x")
            assert proxy.struck == 1
        through.close()


def test_an_answer_that_comes_twice_is_never_taken_for_the_next_one_s(url: str, sent: int) -> None:
    """A pooler that mixes up answers would otherwise acknowledge what was never done."""
    with Proxy(port_of(url)) as proxy:
        through = PostgresConsensus(through_proxy(url, proxy))
        assert through.compare_and_set("s", None, b"x")
        for _ in range(30):
            proxy.cut()
            head = through.head("s")
            assert head is not None
            proxy.at(sent, Fault.DUPLICATE)
            assert through.compare_and_set("s", head.newest, b"x")
            proxy.at(0, None)
            with suppress(Determinate):
                assert through.scan("s", SeqNo(head.seqno + 2), 9) == []
            with suppress(Determinate, Indeterminate):
                assert not through.compare_and_set("s", head.newest, b"lost")
        through.close()


def test_preparing_that_comes_twice_makes_nothing_determinate(
    url: str, consensus: PostgresConsensus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second answer, that the statement is there already, comes in place of what became of the append."""
    monkeypatch.setattr(postgres_sessions, "PREPARED_AFTER", 0)
    with Proxy(port_of(url)) as proxy:
        through = PostgresConsensus(through_proxy(url, proxy))
        for n in range(20):
            fill(consensus, 1, f"s{n}")
            proxy.cut()
            through.head("s")
            proxy.at(1, Fault.DUPLICATE)
            with suppress(Indeterminate):
                assert through.compare_and_set(f"s{n}", after(1), b"x")
                assert [row.seqno for row in consensus.scan(f"s{n}", SeqNo(0), 9)] == [1, 2]
        through.close()


def test_the_layout_is_made_once_by_many_and_a_newer_one_is_refused_untouched(
    url: str, schema: str, sql: psycopg.Connection
) -> None:
    for read_only in (True, False):
        with pytest.raises(NotFound):
            open_location("memory:", url, read_only=read_only)
    assert sql.execute("SELECT count(*) FROM pg_namespace WHERE nspname = %s", (schema,)).fetchone() == (0,)
    with ThreadPoolExecutor(6) as pool:
        opened = list(pool.map(lambda _: PostgresConsensus(url), range(6)))
    assert [one.compare_and_set("s", None, b"x") for one in opened].count(True) == 1
    for one in opened:
        one.close()
    sql.execute(f"UPDATE {schema}.layout SET version = 2".encode())
    for options in ({"create": True}, {}, {"read_only": True}):
        with pytest.raises(NewerFormat) as error:
            open_location("memory:", url, **options)  # type: ignore[arg-type]
        assert error.value.fields == {"found": 2, "known": 1}


def test_tables_of_somebody_else_are_left_alone(url: str, schema: str, sql: psycopg.Connection) -> None:
    sql.execute(f"CREATE SCHEMA {schema}; CREATE TABLE {schema}.shard_log (a int)".encode())
    with pytest.raises(InvalidUsage, match="persist_schema"):
        PostgresConsensus(url)
    assert sql.execute("SELECT count(*) FROM pg_class WHERE relname = 'shard_head' AND relnamespace = %s::regnamespace",
                       (schema,)).fetchone() == (0,)  # fmt: skip


def test_a_role_with_the_documented_rights_reads_or_writes_and_no_more(
    consensus: PostgresConsensus, url: str, schema: str, sql: psycopg.Connection
) -> None:
    reader, writer = f"{schema}_r", f"{schema}_w"
    sql.execute(
        f"""
        CREATE ROLE {reader} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {reader};
        GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {reader};
        CREATE ROLE {writer} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {writer};
        GRANT SELECT ON {schema}.layout TO {writer};
        GRANT SELECT, INSERT, UPDATE ON {schema}.shard_head TO {writer};
        GRANT SELECT, INSERT, DELETE ON {schema}.shard_log TO {writer};
        """.encode()
    )
    try:
        writes = PostgresConsensus(as_role(url, writer))
        assert writes.compare_and_set("s", None, b"s1")
        assert writes.compare_and_set_many({"s": (after(1), b"s2"), "t": (None, b"t1")})
        assert writes.truncate("s", SeqNo(2)) == 1
        reads = PostgresConsensus(as_role(url, reader), create=False)
        assert reads.head("s") == Row(SeqNo(2), b"s2")
        assert reads.now() > 0
        with pytest.raises(InvalidUsage, match="permission denied"):
            reads.compare_and_set("s", after(2), b"x")
        writes.close()
        reads.close()
    finally:
        sql.execute(f"DROP OWNED BY {reader}, {writer}; DROP ROLE {reader}; DROP ROLE {writer}".encode())


def test_tables_from_different_copies_are_damage(
    consensus: PostgresConsensus, schema: str, sql: psycopg.Connection
) -> None:
    fill(consensus, 3)
    sql.execute(f"UPDATE {schema}.shard_head SET seqno = 2".encode())
    with pytest.raises(Corrupt, match="different copies"):
        consensus.compare_and_set("s", after(2), b"x")


def test_more_threads_than_connections_wait_for_one(url: str) -> None:
    consensus = PostgresConsensus(url, connections=2)
    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(lambda n: consensus.compare_and_set(f"s{n}", None, b"x"), range(60)))
    assert len(consensus._sessions._idle) <= 2
    consensus.close()


def test_a_key_with_a_nul_is_refused_and_not_cut_short(consensus: PostgresConsensus) -> None:
    with pytest.raises(Determinate):
        consensus.compare_and_set("a\0b", None, b"x")
    assert list(consensus.list_keys()) == []


def test_urls_are_libpq_s_with_a_schema_beside() -> None:
    conninfo, schema = parse_url(
        "postgresql://me:secret@a:1,b:2/db?sslmode=require&persist_schema=team&application_name=x"
    )
    assert schema == "team"
    assert "persist_schema" not in conninfo
    for part in ("host=a,b", "port=1,2", "sslmode=require", "application_name=x", "target_session_attrs=primary"):
        assert part in conninfo
    assert canonical("postgres://h/db") == "postgresql://h/db"
    for wrong in ("postgresql://h/db?persist_schema=Not-One", "postgresql://h/db?nonsense=1"):
        with pytest.raises(InvalidUsage):
            canonical(wrong)


def test_messages_do_not_tell_the_password() -> None:
    with pytest.raises(Determinate) as error:
        PostgresConsensus(f"postgresql://me:topsecret@127.0.0.1:{servers.free_port()}/db?connect_timeout=2")
    assert "topsecret" not in str(error.value)
    assert "127.0.0.1" in str(error.value)


def test_blobs_are_not_kept_in_postgresql_and_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidUsage, match="consensus="):
        open_location("postgresql://h/db")
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for name in [name for name in sys.modules if name.startswith("persist_lib.location.postgres.consensus")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(InvalidUsage, match=r"persist-lib\[postgres\]"):
        scheme.with_extra("persist_lib.location.postgres.consensus", "this location", "postgres")


def port_of(url: str) -> int:
    conninfo, _ = parse_url(url)
    return int(psycopg.conninfo.conninfo_to_dict(conninfo).get("port") or 5432)


def through_proxy(url: str, proxy: Proxy) -> str:
    return url.replace(f":{port_of(url)}/", f":{proxy.port}/")


def as_role(url: str, role: str) -> str:
    return url.replace("postgres@", f"{role}@")
