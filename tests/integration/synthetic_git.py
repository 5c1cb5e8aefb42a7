"""Git repositories for tests: made with git itself, or generated at any size through `git fast-import`, from a seed."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ODD = [b"tab\there", b'quo"te', b"line\nfeed", b"\xff\xfe\x80", "ü".encode(), b" blank ", b"-dash", b"back\\slash",
       b":100644 100644 " + b"1" * 40 + b" " + b"2" * 40 + b" M", b"\x01\x7f"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Git:
    """A repository to be written by tests, out of reach of the user's own configuration."""

    path: Path

    @classmethod
    def init(cls, path: Path, *options: str) -> Git:
        path.mkdir(parents=True, exist_ok=True)
        git = cls(path)
        git.run("init", "-q", "-b", "main", *options)
        return git

    def run(self, *arguments: str | bytes, stdin: bytes = b"", date: int = 1_600_000_000) -> str:
        person = {f"GIT_{who}_{what}": said for who in ("AUTHOR", "COMMITTER")
                  for what, said in (("NAME", "a"), ("EMAIL", "a@example.org"), ("DATE", f"{date} +0000"))}  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment |= person | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        command = ["git", "-C", self.path, *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, env=environment, check=False)
        assert done.returncode == 0, (arguments, done.stderr)
        return done.stdout.decode("utf-8", "surrogateescape").strip()

    def write(self, name: str | bytes, contents: str) -> None:
        """Write a file, in directories as needed."""
        path = self.path / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(contents, encoding="utf-8")

    def commit(self, message: str = "some change", *options: str) -> str:
        """Commit all there is and return the id."""
        self.run("add", "-A")
        self.run("commit", "-q", "--allow-empty", "-m", message, *options)
        return self.run("rev-parse", "HEAD")

    def fast_import(self, seed: int, commits: int, changes: int = 4) -> None:
        """Fill an empty repository with a generated history."""
        options = ("-c", "core.compression=1", "fast-import", "--quiet", "--depth=5")
        git = subprocess.Popen(["git", "-C", self.path, *options], stdin=subprocess.PIPE)
        assert git.stdin is not None
        with git.stdin:
            for command in Generated(random.Random(seed), changes).stream(commits):
                git.stdin.write(command)
        assert git.wait() == 0


@dataclass(slots=True)
class Generated:
    """A history with additions, changes, renames, deletions, modes, types, submodules, odd paths and merges."""

    random: random.Random
    changes: int
    files: list[bytes] = field(default_factory=list)
    number: int = 0

    def stream(self, commits: int) -> Iterator[bytes]:
        for position in range(commits):
            merged = []
            if position and self.random.random() < 0.1:
                merged = [f"refs/heads/side{n}" for n in range(self.random.choice((1, 1, 1, 2, 3)))]
            changes = b"" if self.random.random() < 0.05 else self._changes()
            for side in merged:
                # A side branch holds what main will, and a file of its own that main will not take.
                yield self._commit(side, position, parents=[f":{position}"], changes=changes + self._file(b"side"))
            yield self._commit("refs/heads/main", position, mark=position + 1, merges=merged, changes=changes)

    def _commit(
        self,
        branch: str,
        position: int,
        *,
        mark: int = 0,
        parents: list[str] | None = None,
        merges: list[str] | None = None,
        changes: bytes = b"",
    ) -> bytes:
        message = f"commit {position}\nbody".encode()
        lines = [f"commit {branch}"] + [f"mark :{mark}"] * bool(mark)
        lines += [f"committer a <a@example.org> {1_500_000_000 + position} +0000", f"data {len(message)}"]
        after = [f"from {parent}" for parent in parents or ()] + [f"merge {merge}" for merge in merges or ()]
        if not parents and mark > 1:
            after.insert(0, f"from :{mark - 1}")
        return (
            "\n".join(lines).encode() + b"\n" + message + b"\n" + b"".join(f"{a}\n".encode() for a in after) + changes
        )

    def _changes(self) -> bytes:
        return b"".join(self._change() for _ in range(self.random.randint(1, 2 * self.changes - 1)))

    def _change(self) -> bytes:
        kind = self.random.random()
        if kind < (0.2 if len(self.files) < 4_000 else 0.1) or len(self.files) < 10:
            return self._added()
        at = self.random.randrange(len(self.files))
        if kind < 0.26:
            self.files[at], self.files[-1] = self.files[-1], self.files[at]
            return b"D " + quoted(self.files.pop()) + b"\n"
        if kind < 0.32:
            old, self.files[at] = self.files[at], self._name()
            return b"R " + quoted(old) + b" " + quoted(self.files[at]) + b"\n"
        return self._file(self.files[at])

    def _added(self) -> bytes:
        self.files.append(self._name())
        return self._file(self.files[-1])

    def _name(self) -> bytes:
        self.number += 1
        odd = self.random.choice(ODD) if self.random.random() < 0.05 else b"file"
        return b"d%02d/e%d/" % (self.random.randrange(40), self.random.randrange(8)) + odd + b"%d" % self.number

    def _file(self, path: bytes) -> bytes:
        mode = self.random.choice(("100644",) * 8 + ("100755", "120000", "160000"))
        if mode == "160000":
            return f"M 160000 {self.random.getrandbits(150) + 1:040x} ".encode() + quoted(path) + b"\n"
        contents = b"%d" % self.random.randrange(5_000)  # so that object ids repeat
        return b"M %s inline %s\ndata %d\n%s\n" % (mode.encode(), quoted(path), len(contents), contents)


def quoted(path: bytes) -> bytes:
    """A path as fast-import reads it."""
    plain = {ord('"'), ord("\\")}
    return (
        b'"'
        + b"".join(b"\\%03o" % byte if byte in plain or not 32 <= byte < 127 else bytes([byte]) for byte in path)
        + b'"'
    )
