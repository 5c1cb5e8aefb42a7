"""Calls of git: a repository's first-parent history, what each commit changed, and what each commit's tree holds.

Only plumbing commands are called (`rev-list`, `diff-tree`, `ls-tree`). Every option that a user's configuration could
change is set explicitly, and the environment's GIT_* variables are dropped. Replacement refs and grafts are ignored:
they would change the contents of an old commit without changing its id. A shallow clone begins at its boundary commit,
which then counts as a root; in a full clone the same commits have other positions.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from examples.failures import GitFailed
from examples.git_log import HEADER

CHUNK_BYTES = 1 << 20

# The caller's GIT_* variables that are kept: where the configuration is (safe.directory), and where git itself is.
_KEPT = ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM", "GIT_EXEC_PATH")
_SET = {"GIT_NO_REPLACE_OBJECTS": "1", "GIT_GRAFT_FILE": os.devnull, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C",
        "GIT_TERMINAL_PROMPT": "0"}  # fmt: skip

# SUBTLE: without --always empty commits vanish; without --root the first commit has no changes; without --diff-merges
# merges have none. --ignore-submodules=none is set because that configuration affects plumbing too. The other options
# are defaults, stated so that no configuration changes them.
_DIFF_TREE = ("diff-tree", "--stdin", "--always", "--root", "--diff-merges=first-parent", "-r", "-z", "--raw",
              "--no-abbrev", "--no-renames", "--no-relative", "--ignore-submodules=none", "--no-ext-diff",
              "--no-textconv", "--encoding=UTF-8", f"--format=tformat:{HEADER}")  # fmt: skip


@dataclass(frozen=True, slots=True)
class History:
    """The ids of a first-parent history, root first, in an unnamed file of lines of equal length.

    A million commits take 41 MB on disk and no memory.
    """

    _lines: IO[bytes]
    id_chars: int

    def __len__(self) -> int:
        return os.fstat(self._lines.fileno()).st_size // (self.id_chars + 1)

    def __getitem__(self, position: int) -> str:
        if not 0 <= position < len(self):
            raise IndexError(position)
        return self.read(position, position + 1).decode("ascii").strip()

    def read(self, lower: int, upper: int) -> bytes:
        """The lines of the positions in `[lower, upper)`."""
        line = self.id_chars + 1
        return os.pread(self._lines.fileno(), max(0, upper - lower) * line, lower * line)


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository, bare or not, given by its path or that of any directory in it."""

    path: Path

    def head(self, rev: str = "HEAD") -> str | None:
        """The commit id that `rev` names, or None if the repository has no commit yet. GitFailed for an unknown rev."""
        self._ask("rev-parse", "--git-dir")
        if rev == "HEAD" and self._is_unborn():
            return None
        named = self._ask("rev-parse", "-q", "--verify", "--end-of-options", f"{rev}^{{commit}}", may_fail=True)
        if not named:
            raise GitFailed(f"{self.path} has no commit that is called {rev!r}; `git log` and `git branch` show some")
        return named.decode("ascii").strip()

    def is_shallow(self) -> bool:
        """Whether this is a shallow clone: its history was cut off when it was made."""
        return self._ask("rev-parse", "--is-shallow-repository").strip() == b"true"

    def id_chars(self) -> int:
        """How many hexadecimal digits an object id has: 40, or 64 in a sha256 repository."""
        return {b"sha1": 40, b"sha256": 64}[self._ask("rev-parse", "--show-object-format").strip()]

    @contextmanager
    def history(self, rev: str = "HEAD") -> Iterator[History]:
        """Yield the first-parent history of `rev` as it is now; later pushes do not change it. Empty if no commits."""
        head = self.head(rev)
        with tempfile.TemporaryFile() as lines:
            if head is not None:
                self._ask("rev-list", "--first-parent", "--reverse", head, stdout=lines)
            yield History(lines, self.id_chars())

    @contextmanager
    def changes(self, history: History, lower: int, upper: int) -> Iterator[Iterator[bytes]]:
        """Yield what the commits at `[lower, upper)` changed, in chunks for `git_log.parse_log`; in bounded memory."""
        with tempfile.TemporaryFile() as wanted, tempfile.TemporaryFile() as said:
            for start in range(lower, upper, 4096):
                wanted.write(history.read(start, min(start + 4096, upper)))
            wanted.seek(0)
            command = self._command(*_DIFF_TREE)
            git = subprocess.Popen(command, stdin=wanted, stdout=subprocess.PIPE, stderr=said, env=_environment())
            try:
                yield _chunks(git, command, said)
            finally:
                git.kill()
                git.communicate()

    def ls_tree(self, commit: str) -> bytes:
        """Every path of a commit, with mode and object id: NUL-terminated entries of `git ls-tree -r -z`."""
        return self._ask("ls-tree", "-r", "-z", "--full-tree", commit)

    def _is_unborn(self) -> bool:
        """Whether HEAD names a branch that does not exist yet."""
        branch = self._ask("symbolic-ref", "-q", "HEAD", may_fail=True).decode("utf-8", "surrogateescape").strip()
        return branch != "" and not self._ask("for-each-ref", "--count=1", branch)

    def _command(self, *arguments: str) -> list[str]:
        return ["git", "--no-pager", "-C", os.fspath(self.path), *arguments]

    def _ask(self, *arguments: str, stdout: IO[bytes] | int = subprocess.PIPE, may_fail: bool = False) -> bytes:
        command = self._command(*arguments)
        try:
            done = subprocess.run(
                command,
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.PIPE,
                env=_environment(),
            )
        except OSError as error:
            raise GitFailed(f"git could not be started: {error}") from error
        if done.returncode != 0 and not may_fail:
            raise _failed(command, done.returncode, done.stderr)
        return done.stdout or b""


def _chunks(git: subprocess.Popen[bytes], command: list[str], said: IO[bytes]) -> Iterator[bytes]:
    assert git.stdout is not None
    while chunk := git.stdout.read(CHUNK_BYTES):
        yield chunk
    # SUBTLE: without this check, the output of a git that died would look like a shorter history.
    if git.wait() != 0:
        said.seek(0)
        raise _failed(command, git.returncode, said.read())


def _failed(command: list[str], code: int, said: bytes) -> GitFailed:
    text = said.decode("utf-8", "replace").strip() or f"exit code {code}"
    return GitFailed(f"`{' '.join(command[:8])} …` failed: {text}")


def _environment() -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in _KEPT}
    return mine | _SET
