"""A git repository's file tree over its first-parent history, as a definite time-varying collection.

    python -m examples.git_history --repo . --location file:./data --verify 20

Key: a path, as bytes. Value: mode and object id. Time: the commit's position in the first-parent history, root first.
At every commit the shard's snapshot equals its `git ls-tree -r`, and `--verify` compares them.

A second shard, `<shard>_commits`, records which commit is at which position. Both are appended in lock-step, each by
compare-and-append at its own upper, commits first. So a killed ingestion goes on where it stopped, and nothing is lost
or doubled. A repository whose history was rewritten is refused, so that two histories are never mixed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import persist_lib as persist
from examples import console
from examples.failures import Differs, Failed, OtherSource
from examples.git_log import COMMITS, FILES, Append, appends, parse_log, parse_tree
from examples.git_repository import History, Repository

# By default an append holds many commits if many are missing. Each keeps its own time.
MAX_COMMITS, MAX_UPDATES = 1_000, 100_000


@dataclass(frozen=True, slots=True)
class Ingested:
    """What one run did: it ingested the positions `[lower, upper)`, by so many appends with so many updates in all."""

    lower: int
    upper: int
    appends: int
    updates: int


@dataclass(frozen=True, slots=True)
class _Half:
    """One of the two shards."""

    write: persist.WriteHandle
    read: persist.ReadHandle

    @property
    def upper(self) -> int:
        time = self.write.fetch_upper().time
        if time is None:
            raise Failed("the shard is finished: nothing can be appended to it any more")
        return time

    def append(self, table: pa.Table, upper: int, own: int) -> int:
        """Append what of `table` is at or beyond the shard's own upper, and return its new upper."""
        if own >= upper:
            return own
        start = int(np.searchsorted(table["_time"].to_numpy(), np.uint64(own)))
        self.write.compare_and_append(table.slice(start), expected_upper=own, new_upper=upper)
        return upper


def ingest(
    client: persist.Client,
    repository: Repository,
    shard: str = "git_history",
    *,
    rev: str = "HEAD",
    max_commits: int = MAX_COMMITS,
    max_updates: int = MAX_UPDATES,
    limit: int | None = None,
    on_append: Callable[[Append], None] = lambda _: None,
) -> Ingested:
    """Append the commits of `rev` that the shard does not hold yet, `limit` at most. Safe to kill and to run again.

    Raises OtherSource if what the shard holds is not the beginning of this history; nothing is written then.
    """
    with repository.history(rev) as history, _open(client, shard) as (files, commits):
        uppers = files.upper, commits.upper
        _check_same(repository, history, files, commits, uppers)
        lower = min(uppers)
        upper = len(history) if limit is None else min(len(history), lower + limit)
        count = updates = 0
        with repository.changes(history, lower, upper) as chunks:
            for append in appends(parse_log(chunks, history.id_chars, lower), lower, max_commits, max_updates):
                _check_ids(append, history)
                uppers = _append(append, files, commits, uppers)
                count, updates = count + 1, updates + len(append.files)
                on_append(append)
        return Ingested(lower, upper, count, updates)


def pending(client: persist.Client, repository: Repository, shard: str = "git_history", *, rev: str = "HEAD") -> int:
    """How many commits of `rev` the shard does not hold yet."""
    with repository.history(rev) as history, _open(client, shard) as (files, commits):
        return max(0, len(history) - min(files.upper, commits.upper))


def verify(
    read: persist.ReadHandle,
    repository: Repository,
    positions: Iterable[int],
    *,
    rev: str = "HEAD",
    on_verified: Callable[[int], None] = lambda _: None,
) -> int:
    """Compare the snapshot at each position with `git ls-tree -r` of its commit; return how many paths were compared.

    Raises Differs if they are not equal, or if a path occurs more than once.
    """
    paths = 0
    with repository.history(rev) as history:
        for position in positions:
            contents = read.snapshot(as_of=position, diff=True).to_arrow()
            paths += _check_tree(contents, repository, history[position], position)
            on_verified(position)
    return paths


def spread(count: int, lower: int, upper: int) -> list[int]:
    """At most `count` positions in `[lower, upper)`, evenly spread; the last and, from two on, the first among them."""
    return sorted({int(position) for position in np.linspace(upper - 1, lower, min(count, upper - lower)).round()})


@contextmanager
def _open(client: persist.Client, shard: str) -> Iterator[tuple[_Half, _Half]]:
    with ExitStack() as stack:
        halves = [client.open_shard(shard, FILES), client.open_shard(f"{shard}_commits", COMMITS)]
        for handle in (handle for half in halves for handle in half):
            stack.enter_context(handle)
        yield _Half(*halves[0]), _Half(*halves[1])


def _append(append: Append, files: _Half, commits: _Half, uppers: tuple[int, int]) -> tuple[int, int]:
    # SUBTLE: commits first, so that after any kill the commits of everything in the files' shard are on record.
    recorded = commits.append(append.commits, append.upper, uppers[1])
    return files.append(append.files, append.upper, uppers[0]), recorded


def _check_ids(append: Append, history: History) -> None:
    """Check that the parsed headers are those of the commits asked for, so that no path was taken for a header."""
    asked = history.read(append.lower, append.upper).decode("ascii").split()
    if append.commits["commit"].to_pylist() != asked:
        raise Failed(f"git answered for other commits than those asked for, near {asked[0]}")


def _check_same(
    repository: Repository, history: History, files: _Half, commits: _Half, uppers: tuple[int, int]
) -> None:
    """Refuse unless what the shards hold is the beginning of this history."""
    held, recorded = uppers
    if max(uppers) > len(history):
        raise OtherSource(_other(f"it holds {max(uppers)} commits, the repository has {len(history)}"))
    if recorded and _recorded(commits.read, recorded, [recorded - 1]) != [history[recorded - 1]]:
        ids = _recorded(commits.read, recorded)
        position = next(p for p in range(recorded) if ids[p] != history[p])
        there = f"position {position} is commit {ids[position]} in the shard and {history[position]} in the repository"
        raise OtherSource(_other(there))
    if held > recorded:
        # This happens only if the record was lost. The tree itself still shows whether it belongs to this history.
        _check_tree(files.read.snapshot(as_of=held - 1, diff=True).to_arrow(), repository, history[held - 1], held - 1)


def _other(difference: str) -> str:
    return (
        f"the shard was filled from another history: {difference}. The history was rewritten, the repository or the "
        "revision is another one, or a shallow clone was used. Nothing was written. Choose the repository and revision "
        "that the shard was filled from (--repo, --rev), or a new shard (--shard)"
    )


def _recorded(read: persist.ReadHandle, upper: int, key: list[int] | None = None) -> list[str]:
    """The commit ids on record below `upper`, by position; or the one at `key`."""
    recorded = read.snapshot(as_of=upper - 1, key=key).to_arrow().sort_by("position")
    if recorded["position"].to_pylist() != (key or list(range(upper))):
        raise Failed(f"the record of commits in {read.shard} has gaps below position {upper}; ingest into a new shard")
    return list(recorded["commit"].to_pylist())


def _check_tree(contents: pa.Table, repository: Repository, commit: str, position: int) -> int:
    actual = contents.sort_by("path")
    expected = parse_tree(repository.ls_tree(commit)).sort_by("path")
    same = all(actual[name].equals(expected[name]) for name in FILES.names)
    if not same or not pc.all(pc.equal(actual["_diff"], 1), min_count=0).as_py():
        raise Differs(f"at position {position}, commit {commit}: {_difference(actual, expected)}")
    return len(expected)


def _difference(actual: pa.Table, expected: pa.Table) -> str:
    ones = expected.append_column("_diff", pa.array(np.ones(len(expected), np.int64)))
    ours, theirs = ({tuple(row.values()) for row in table.to_pylist()} for table in (actual, ones))
    path = min((ours ^ theirs), default=(b"",))[0]
    said = [[row[1:] for row in side if row[0] == path] for side in (ours, theirs)]
    return f"{len(ours ^ theirs)} entries differ; path {path!r} is {said[0]} in the shard and {said[1]} in git"


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code (see `console`)."""
    options = _parser().parse_args(arguments)
    return console.run(lambda: _program(options))


def _program(options: argparse.Namespace) -> None:
    repository = Repository(options.repo)
    if repository.is_shallow():
        console.errors.print("this is a shallow clone: its history begins where it was cut off, not at the real root")
    with persist.open(options.location) as client:
        total = pending(client, repository, options.shard, rev=options.rev)
        with console.progress("commits", min(total, options.limit or total)) as advance:
            done = ingest(
                client, repository, options.shard, rev=options.rev, limit=options.limit,
                max_commits=options.commits_per_append or MAX_COMMITS,
                on_append=lambda append: advance(append.upper - append.lower),
            )  # fmt: skip
        print(f"{options.shard}: {done.upper - done.lower} commits, {done.updates} updates, {done.appends} appends")
        _verify(client, repository, options, done.upper)


def _verify(client: persist.Client, repository: Repository, options: argparse.Namespace, upper: int) -> None:
    if not upper or not (options.every or options.verify):
        return
    with client.open_reader(options.shard, FILES) as read:
        positions = spread(upper if options.every else options.verify, read.since.time or 0, upper)
        with console.progress("verified", len(positions)) as advance:
            paths = verify(read, repository, positions, rev=options.rev, on_verified=lambda _: advance(1))
    print(f"{options.shard}: {len(positions)} snapshots equal git ls-tree, {paths} paths compared")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.git_history", description=(__doc__ or "").split("\n")[0])
    own = Path(__file__).resolve().parent.parent
    parser.add_argument("--repo", type=Path, default=own, help="a repository or a directory in one (default: this one)")
    parser.add_argument("--rev", default="HEAD", help="the revision whose first-parent history is read (default: HEAD)")
    parser.add_argument("--location", default="file:./data", help="where the shards are (default: file:./data)")
    parser.add_argument("--shard", default="git_history", help="the shard; its commits go to <shard>_commits")
    parser.add_argument("--limit", type=console.positive, help="at most this many commits in this run")
    parser.add_argument("--commits-per-append", type=console.positive, metavar="N",
                        help=f"default: as many as are missing, up to {MAX_COMMITS}")  # fmt: skip
    parser.add_argument(
        "--verify", type=console.positive, metavar="K", help="then compare K snapshots with git ls-tree"
    )
    parser.add_argument("--every", action="store_true", help="then compare the snapshot at every commit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
