"""Parsing what git says: laws over any history, any chunks, and any appends; and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.failures import NotUnderstood
from examples.git_log import COMMITS, FILES, Append, appends, parse_log, parse_tree

IDS = ["a" * 40, "0123456789abcdef" * 2 + "01234567", "f" * 40]
MODES = ["100644", "100755", "120000", "160000"]
POSES = [
    b":100644 100644 " + b"1" * 40 + b" " + b"2" * 40 + b" M",
    b":",
    b"a//b",
    b"\n:",
    b"\xff\xfe",
    b'quo"te\ttab\nline',
    " ü".encode(),
]
Held = tuple[str, str]
Change = tuple[bytes, Held | None, Held]
Commit = tuple[str, int, bytes, list[Change]]

paths = st.sampled_from(POSES) | st.binary(min_size=1).filter(lambda p: b"\0" not in p and not p.startswith(b"/"))
held = st.tuples(st.sampled_from(MODES), st.sampled_from(IDS))
changes = st.tuples(paths, st.none() | held, held)
subjects = st.binary().filter(lambda s: b"\0" not in s)
commits = st.tuples(st.sampled_from(IDS), st.integers(-(10**17), 10**17), subjects, st.lists(changes, max_size=4))
histories = st.lists(commits, max_size=6)
sizes = st.sampled_from([23, 61, 99, 100, 101, 350, 4096])
law = settings(max_examples=60, deadline=None)


def said(history: Sequence[Commit], *, reverse: bool = False) -> bytes:
    """What git writes of a history. `reverse` turns additions into deletions."""
    return b"".join(_commit_said(commit, reverse) for commit in history)


def _commit_said(commit: Commit, reverse: bool) -> bytes:
    id_, authored, subject, changes = commit
    entries = []
    for path, before, after in changes:
        sides = [before or ("000000", "0" * 40), after]
        old, new = reversed(sides) if reverse else sides
        entries.append(f":{old[0]} {new[0]} {old[1]} {new[1]} M".encode() + b"\0" + path + b"\0")
    header = f"//{id_} {authored:<20d} ".encode() + subject + b"\0"
    return header + (b"\n" if entries else b"") + b"".join(entries)


def meant(history: Sequence[Commit], first: int, *, reverse: bool = False) -> list[tuple[object, ...]]:
    updates: list[tuple[object, ...]] = []
    for position, commit in enumerate(history, first):
        for path, before, after in commit[3]:
            old, new = (after, before) if reverse else (before, after)
            updates += [(path, *old, position, -1)] if old else []
            updates += [(path, *new, position, 1)] if new else []
    return updates


def rows(table: pa.Table) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in table.to_pylist()]


def chunked(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@law
@given(histories, sizes, st.integers(0, 3), st.booleans())
def test_every_change_becomes_its_updates_wherever_the_chunks_are_cut(
    history: list[Commit], size: int, first: int, reverse: bool
) -> None:
    pieces = list(parse_log(chunked(said(history, reverse=reverse), size), 40, first))
    assert [row for piece in pieces for row in rows(piece.files)] == meant(history, first, reverse=reverse)
    expected = [
        (position, id_, authored, subject, position, 1)
        for position, (id_, authored, subject, _) in enumerate(history, first)
    ]
    assert [row for piece in pieces for row in rows(piece.commits)] == expected
    assert pieces[-1].complete == first + len(history)
    assert all(piece.files.schema == FILES.updates and piece.commits.schema == COMMITS.updates for piece in pieces)


@law
@given(histories, sizes)
def test_no_update_comes_after_its_commit_was_called_complete(history: list[Commit], size: int) -> None:
    complete = 0
    for piece in parse_log(chunked(said(history), size), 40, 0):
        assert all(position >= complete for position in piece.files["_time"].to_pylist())
        assert piece.complete >= complete
        complete = piece.complete


@law
@given(histories, sizes, st.integers(1, 4), st.integers(1, 6), st.integers(0, 3))
def test_appends_are_contiguous_whole_commits_within_both_limits(
    history: list[Commit], size: int, max_commits: int, max_updates: int, first: int
) -> None:
    cut = list(appends(parse_log(chunked(said(history), size), 40, first), first, max_commits, max_updates))
    bounds = [first, *(append.upper for append in cut)]
    assert [append.lower for append in cut] == bounds[:-1]
    assert bounds[-1] == first + len(history)
    assert [row for append in cut for row in rows(append.files)] == meant(history, first)
    for append in cut:
        check_append(append, max_commits, max_updates)


def check_append(append: Append, max_commits: int, max_updates: int) -> None:
    assert 1 <= append.upper - append.lower <= max_commits
    assert len(append.files) <= max_updates or append.upper == append.lower + 1
    assert append.commits["position"].to_pylist() == list(range(append.lower, append.upper))
    assert all(append.lower <= position < append.upper for position in append.files["_time"].to_pylist())


def test_appends_are_as_large_as_their_limits_allow() -> None:
    history: list[Commit] = [(IDS[0], 1, b"s", [(b"p", None, ("100644", IDS[0]))])] * 10
    cut = appends(parse_log([said(history)], 40, 0), 0, 4, 100)
    assert [(append.lower, append.upper) for append in cut] == [(0, 4), (4, 8), (8, 10)]
    cut = appends(parse_log([said(history)], 40, 0), 0, 100, 3)
    assert [append.upper for append in cut] == [3, 6, 9, 10]


@pytest.mark.parametrize("authored", [b"", b"noon", b"9" * 19, b"99999999999999999.."])
def test_a_malformed_author_time_is_null_and_does_not_stop_the_rest(authored: bytes) -> None:
    (piece, _) = parse_log([b"//" + IDS[0].encode() + b" " + authored.ljust(20) + b" subject\0"], 40, 0)
    assert rows(piece.commits) == [(0, IDS[0], None, b"subject", 0, 1)]


def test_sha256_ids_are_taken_whole() -> None:
    id_ = "ab" * 32
    entry = f":000000 100644 {'0' * 64} {id_} A\0path\0".encode()
    (piece, _) = parse_log([f"//{id_} {5:<20d} s\0\n".encode() + entry], 64, 0)
    assert rows(piece.files) == [(b"path", "100644", id_, 0, 1)]


@pytest.mark.parametrize("lost", [1, 10, 60, 105])
def test_an_answer_that_ends_early_is_not_taken_for_a_short_history(lost: int) -> None:
    whole = said([(IDS[0], 1, b"s", [(b"some path", None, ("100644", IDS[0]))])])
    with pytest.raises(NotUnderstood):
        list(parse_log([whole[:-lost]], 40, 0))


@pytest.mark.parametrize("strange", [b"path\0path\0", b":100644 100644 short M\0path\0", b"error: x\0y\0"])
def test_anything_else_than_changes_is_refused(strange: bytes) -> None:
    with pytest.raises(NotUnderstood):
        list(parse_log([said([(IDS[0], 1, b"s", [])]) + strange], 40, 0))


def test_a_description_followed_by_a_header_is_refused() -> None:
    entry = f":000000 100644 {'0' * 40} {IDS[0]} A\0".encode()
    commit = said([(IDS[0], 1, b"s", [])])
    with pytest.raises(NotUnderstood):
        list(parse_log([commit + entry + commit], 40, 0))


@law
@given(st.lists(st.tuples(paths, held)))
def test_a_listed_tree_is_read_back_path_by_path(entries: list[tuple[bytes, Held]]) -> None:
    kinds = {"160000": "commit"}
    listing = b"".join(
        f"{mode} {kinds.get(mode, 'blob')} {id_}\t".encode() + path + b"\0" for path, (mode, id_) in entries
    )
    table = parse_tree(listing)
    assert rows(table) == [(path, mode, id_) for path, (mode, id_) in entries]
    assert table.schema == FILES.data
