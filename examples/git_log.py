"""From the bytes of `git diff-tree --raw -z` to updates: pure, and vectorised over tokens.

The bytes are tokens that end in NUL: a header for each commit, then for each changed path a fixed-length description
(`:old-mode new-mode old-id new-id status`) and the path. A change retracts what the path held before (-1) and asserts
what it holds now (+1), at the commit's position in the history.

SUBTLE: a path is any bytes but NUL, and may look just like a description. But it cannot begin with `/`. So headers
begin with `/`, and between two headers descriptions and paths alternate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

import persist_lib as persist
from examples.failures import NotUnderstood

# The author time is padded, so that the part before the subject always has the same length.
HEADER = "//%H %<(20)%at %s"
_MARK, _TIME_CHARS = b"//", 20
_ABSENT = b"0"

FILES = persist.Schema(key={"path": "binary not null"}, value={"mode": "string", "object": "string"})
COMMITS = persist.Schema(
    key={"position": "int64 not null"}, value={"commit": "string", "authored": "int64", "subject": "binary"}
)

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of the history's updates, in order of time. All updates of commits below position `complete` have come."""

    files: pa.Table
    commits: pa.Table
    complete: int


@dataclass(frozen=True, slots=True)
class Append:
    """All updates of the commits at the positions in `[lower, upper)`."""

    lower: int
    upper: int
    files: pa.Table
    commits: pa.Table


def parse_log(chunks: Iterable[bytes], id_chars: int, first: int) -> Iterator[Piece]:
    """Yield the updates in the chunks; the first commit is at `first`. Memory: a few times the largest chunk."""
    rest, following = b"", first
    for chunk in chunks:
        data = rest + chunk
        tokens = _Tokens.of(data, following, id_chars)
        rest, following = data[tokens.used :], tokens.following
        # The last commit of this chunk may continue in the next one.
        yield tokens.piece(max(first, following - 1))
    if rest:
        raise NotUnderstood(f"git's answer ends in the middle of an entry: {rest[:200]!r}")
    yield Piece(FILES.updates.empty_table(), COMMITS.updates.empty_table(), following)


def appends(pieces: Iterable[Piece], lower: int, max_commits: int, max_updates: int) -> Iterator[Append]:
    """Cut the pieces between commits: at most `max_commits`, and at most `max_updates` unless one commit has more."""
    rest = Append(lower, lower, FILES.updates.empty_table(), COMMITS.updates.empty_table())
    for piece in pieces:
        files = pa.concat_tables([rest.files, piece.files]).combine_chunks()
        commits = pa.concat_tables([rest.commits, piece.commits]).combine_chunks()
        begun = Append(rest.lower, piece.complete, files, commits)
        rest = begun
        for full, left in _cuts(begun, max_commits, max_updates):
            yield full
            rest = left
    if rest.lower < rest.upper:
        yield rest


def parse_tree(listing: bytes) -> pa.Table:
    """A table of path, mode, object from `git ls-tree -r -z`: `mode SP type SP object TAB path NUL`."""
    data = np.frombuffer(listing, np.uint8)
    ends = np.flatnonzero(data == 0)
    starts = np.concatenate([[0], ends[:-1] + 1])[: len(ends)]
    # Paths may hold tabs; the first one ends the description.
    tabs = np.flatnonzero(data == ord("\t"))
    tabs = tabs[np.searchsorted(tabs, starts)] if len(ends) else tabs
    ids = starts + np.where(data[starts + 7] == ord("c"), len("160000 commit "), len("100644 blob "))
    id_chars = int(tabs[0] - ids[0]) if len(ends) else 40
    if not np.array_equal(tabs - ids, np.full(len(ends), id_chars)):
        raise NotUnderstood("git ls-tree listed something that is neither a blob nor a submodule's commit")
    columns = [_spans(data, tabs + 1, ends), _text(data, starts, 6), _text(data, ids, id_chars)]
    return pa.table(columns, schema=FILES.data)


def _cuts(begun: Append, max_commits: int, max_updates: int) -> Iterator[tuple[Append, Append]]:
    """The full appends that the commits below `begun.upper` make, each with what is left after it."""
    times = begun.files["_time"].to_numpy()
    lower, done = begun.lower, 0
    while lower < begun.upper:
        upper, excess = lower + max_commits, done + max_updates
        if excess < len(times):
            upper = min(upper, max(lower + 1, int(times[excess])))
        if upper > begun.upper:
            return
        stop, skipped = int(np.searchsorted(times, np.uint64(upper))), lower - begun.lower
        full = Append(lower, upper, begun.files.slice(done, stop - done), begun.commits.slice(skipped, upper - lower))
        lower, done = upper, stop
        yield full, Append(lower, begun.upper, begun.files.slice(done), begun.commits.slice(lower - begun.lower))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The whole tokens of some bytes, up to the last path or header. `header` says which are headers."""

    data: Bytes
    starts: Ints
    ends: Ints
    header: npt.NDArray[np.bool_]
    first: int
    id_chars: int

    @classmethod
    def of(cls, data: bytes, first: int, id_chars: int) -> _Tokens:
        array = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(array == 0)
        starts = np.concatenate([[0], ends[:-1] + 1])[: len(ends)]
        header = (array[starts] == _MARK[0]) & (array[np.minimum(starts + 1, ends)] == _MARK[1])
        # A description whose path is still missing is kept for the next chunk.
        since_header = len(ends) - 1 - int(np.flatnonzero(header)[-1]) if header.any() else len(ends)
        whole = len(ends) - since_header % 2
        return cls(array, starts[:whole], ends[:whole], header[:whole], first, id_chars)

    @property
    def used(self) -> int:
        return int(self.ends[-1]) + 1 if len(self.ends) else 0

    @property
    def following(self) -> int:
        """The position of the next header to come."""
        return self.first + int(self.header.sum())

    def piece(self, complete: int) -> Piece:
        described, paths = self._changes()
        positions = (self.first - 1 + np.cumsum(self.header)).astype(np.uint64)
        return Piece(self._files(described, paths, positions), self._commits(positions[self.header]), complete)

    def _changes(self) -> tuple[Ints, Ints]:
        """The tokens that are descriptions, and those that are their paths."""
        index = np.arange(len(self.header))
        last_header = np.maximum.accumulate(np.where(self.header, index, -1))
        described = np.flatnonzero(~self.header & ((index - last_header) % 2 == 1))
        if described.size and bool(self.header[described + 1].any()):
            raise NotUnderstood("git described a change without saying its path")
        return described, described + 1

    def _files(self, described: Ints, paths: Ints, positions: npt.NDArray[np.uint64]) -> pa.Table:
        length = 18 + 2 * self.id_chars
        # Measured from the end: the first description after a header begins with a line feed.
        begins = self.ends[described] - length
        if not bool(((begins >= self.starts[described]) & (self.data[begins] == ord(":"))).all()):
            raise NotUnderstood("git described a change in an unknown way")
        old, new = begins + 1, begins + 8
        order, diff = _interleave(self._present(old), self._present(new))
        modes = np.concatenate([old, new])[order]
        ids = np.concatenate([old + 14, new + 8 + self.id_chars])[order]
        change = order % max(1, len(described))
        path = _spans(self.data, self.starts[paths][change], self.ends[paths][change])
        columns = [path, _text(self.data, modes, 6), _text(self.data, ids, self.id_chars)]
        return pa.table([*columns, positions[paths][change], diff], schema=FILES.updates)

    def _present(self, modes: Ints) -> npt.NDArray[np.bool_]:
        """Whether the mode at each offset is not 000000: no file type begins with a zero."""
        present: npt.NDArray[np.bool_] = self.data[modes] != _ABSENT[0]
        return present

    def _commits(self, positions: npt.NDArray[np.uint64]) -> pa.Table:
        ids = self.starts[self.header] + len(_MARK)
        times = ids + self.id_chars + 1
        subjects = _spans(self.data, times + _TIME_CHARS + 1, self.ends[self.header])
        authored = _authored(_text(self.data, times, _TIME_CHARS))
        columns = [positions.astype(np.int64), _text(self.data, ids, self.id_chars), authored, subjects]
        return pa.table([*columns, positions, np.ones(len(ids), np.int64)], schema=COMMITS.updates)


def _interleave(old: npt.NDArray[np.bool_], new: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Indices into (old, then new), change by change and old before new, of those present; and their diffs."""
    count = len(old)
    both = np.stack([np.arange(count), np.arange(count) + count], axis=1).ravel()
    order = both[np.stack([old, new], axis=1).ravel()]
    return order, np.where(order < count, -1, 1)


def _text(data: Bytes, starts: Ints, length: int) -> pa.Array:
    """Strings of one length at these offsets."""
    taken = data[starts[:, None] + np.arange(length)]
    if taken.size and taken.max() > 0x7F:
        raise NotUnderstood("git wrote an id, a mode or a time that is not ASCII")
    offsets = np.arange(len(starts) + 1, dtype=np.int32) * length
    return pa.Array.from_buffers(
        pa.string(), len(starts), [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(taken)]
    )


def _spans(data: Bytes, starts: Ints, ends: Ints) -> pa.Array:
    """The bytes of each `[start, end)`, copied together."""
    lengths = ends - starts
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    taken = data[np.repeat(starts, lengths) + within]
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(taken)]
    return pa.Array.from_buffers(pa.binary(), len(starts), buffers)


def _authored(padded: pa.Array) -> pa.Array:
    """Seconds since 1970, or null where a commit's author line is malformed or beyond 18 digits."""
    text = pc.utf8_trim_whitespace(padded)
    valid = pc.match_substring_regex(text, r"^-?[0-9]{1,18}$")
    return pc.cast(pc.if_else(valid, text, pa.scalar(None, pa.string())), pa.int64())
