"""Git histories in a shard, judged by git: at every commit the snapshot is what `git ls-tree -r` lists."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import persist_lib as persist
from examples import git_history
from examples.failures import Differs, GitFailed, OtherSource
from examples.git_history import Ingested, ingest, spread, verify
from examples.git_log import FILES, Append
from examples.git_repository import Repository
from tests.integration.synthetic_git import ODD, Git

ROOT = Path(__file__).resolve().parents[2]
COMMITS = int(os.environ.get("PERSIST_COMMITS", "20000"))
"""Of the longest history. `make long-history` has 100,000 of them."""


@pytest.fixture
def git(tmp_path: Path) -> Git:
    return Git.init(tmp_path / "repo")


def check_every_commit(client: persist.Client, git: Git, commits: int) -> None:
    """The shard holds exactly these commits, each with git's own tree, and their ids on record."""
    with client.open_reader("git_history") as files, client.open_reader("git_history_commits") as record:
        assert files.fetch_upper() == record.fetch_upper() == persist.at(commits)
        verify(files, Repository(git.path), range(commits))
        recorded = record.snapshot(as_of=commits - 1, diff=True).to_arrow().sort_by("position")
    ids = git.run("rev-list", "--first-parent", "--reverse", "HEAD").split()
    assert recorded["commit"].to_pylist() == ids
    assert recorded["position"].to_pylist() == list(range(commits))
    assert set(recorded["_diff"].to_pylist()) == {1}


def ingest_all(client: persist.Client, git: Git, *, max_commits: int = 2) -> Ingested:
    """Ingest, and judge every commit."""
    done = ingest(client, Repository(git.path), max_commits=max_commits)
    check_every_commit(client, git, done.upper)
    return done


def contents(client: persist.Client, position: int) -> dict[bytes, tuple[str, str]]:
    with client.open_reader("git_history") as read:
        rows = read.snapshot(as_of=position, diff=True).to_arrow().to_pylist()
    return {row["path"]: (row["mode"], row["object"]) for row in rows}


def test_paths_of_any_bytes_are_kept_as_they_are(client: persist.Client, git: Git) -> None:
    for number, odd in enumerate(ODD):
        git.write(odd, "contents")
        git.write(b"dir-" + odd + b"/in " + odd, str(number))
    git.commit()
    for odd in ODD:
        git.write(odd, "changed")
        git.commit()
    ingest_all(client, git)
    assert set(ODD) < set(contents(client, len(ODD)))


def test_deletions_modes_and_types_follow_git(client: persist.Client, git: Git) -> None:
    path = git.path / "thing"
    git.write("thing", "a file")
    git.write("other", "stays")
    git.commit()
    path.chmod(0o755)
    git.commit()
    path.unlink()
    path.symlink_to("other")
    git.commit()
    path.unlink()
    git.write("thing/inside", "a directory now")
    git.commit()
    shutil.rmtree(path)
    git.commit()
    git.write("thing", "a file")
    git.commit()
    (git.path / "other").unlink()
    path.unlink()
    git.commit()
    ingest_all(client, git)
    modes = [contents(client, position).get(b"thing", ("", ""))[0] for position in range(7)]
    assert modes == ["100644", "100755", "120000", "", "", "100644", ""]
    assert contents(client, 6) == {}


def test_submodules_are_paths_of_mode_160000(client: persist.Client, git: Git) -> None:
    for key, said in (("diff.ignoreSubmodules", "all"), ("submodule.sub.ignore", "all")):
        git.run("config", key, said)
    git.write(".gitmodules", '[submodule "sub"]\n\tpath = sub\n\turl = ./x\n\tignore = all\n')
    for number in (1, 2, 2, 3):
        git.run("update-index", "--add", "--cacheinfo", f"160000,{number:040x},sub")
        git.run("add", ".gitmodules")
        git.run("commit", "-q", "--allow-empty", "-m", "moved")
    git.run("update-index", "--force-remove", "sub")
    git.run("commit", "-q", "--allow-empty", "-m", "gone")
    ingest_all(client, git)
    held = [contents(client, position).get(b"sub") for position in range(5)]
    assert held == [*(("160000", f"{number:040x}") for number in (1, 2, 2, 3)), None]


def test_a_repository_without_commits_has_nothing_to_ingest_yet(client: persist.Client, git: Git) -> None:
    assert ingest(client, Repository(git.path)) == Ingested(0, 0, 0, 0)
    git.write("a", "1")
    git.commit()
    ingest_all(client, git)


def test_bare_repositories_and_directories_inside_one_are_repositories_too(client: persist.Client, git: Git) -> None:
    git.write("top", "1")
    git.write("below/file", "2")
    git.commit()
    git.run("config", "diff.relative", "true")
    bare = git.path.with_name("bare.git")
    git.run("clone", "-q", "--bare", git.path.as_posix(), bare.as_posix())
    ingest(client, Repository(git.path / "below"))
    check_every_commit(client, git, 1)
    assert ingest(client, Repository(bare)) == Ingested(1, 1, 0, 0)
    assert set(contents(client, 0)) == {b"top", b"below/file"}


def test_sha256_repositories_keep_their_long_ids(client: persist.Client, tmp_path: Path) -> None:
    git = Git.init(tmp_path / "long", "--object-format=sha256")
    for text in ("1", "2"):
        git.write("a", text)
        git.commit()
    ingest_all(client, git)
    assert len(contents(client, 1)[b"a"][1]) == 64


def test_a_shallow_clone_begins_where_it_was_cut_and_is_refused_once_deepened(client: persist.Client, git: Git) -> None:
    for text in ("1", "2", "3", "4"):
        git.write(f"file-{text}", text)
        git.commit()
    shallow = Git(git.path.with_name("shallow"))
    git.run("clone", "-q", "--depth=2", f"file://{git.path}", shallow.path.as_posix())
    assert Repository(shallow.path).is_shallow()
    assert ingest_all(client, shallow) == Ingested(0, 2, appends=1, updates=4)
    shallow.run("fetch", "-q", "--unshallow")
    with pytest.raises(OtherSource, match="position 0"):
        ingest(client, Repository(shallow.path))


def test_replacements_and_grafts_do_not_change_the_past(client: persist.Client, git: Git) -> None:
    ids = []
    for text in ("1", "2", "3"):
        git.write("a", text)
        ids.append(git.commit())
    ingest_all(client, git)
    git.run("replace", ids[1], ids[0])
    (git.path / ".git/info").mkdir(exist_ok=True)
    (git.path / ".git/info/grafts").write_text(f"{ids[2]}\n")
    with client.open_reader("git_history") as read:
        assert ingest(client, Repository(git.path)) == Ingested(3, 3, 0, 0)
        verify(read, Repository(git.path), range(3))


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("core.quotePath", "true"), ("diff.renames", "copies"), ("log.showSignature", "true"), ("color.ui", "always"),
        ("color.diff", "always"), ("log.showRoot", "false"), ("diff.relative", "true"), ("diff.noprefix", "true"),
        ("diff.orderFile", "order"), ("log.diffMerges", "combined"), ("format.pretty", "fuller"),
        ("diff.external", "false"), ("core.abbrev", "4"), ("log.follow", "true"), ("i18n.logOutputEncoding", "latin1"),
        ("core.pager", "false"), ("log.decorate", "full"), ("diff.submodule", "log"), ("diff.algorithm", "patience"),
    ],
)  # fmt: skip
def test_neither_configuration_nor_environment_of_the_user_changes_what_is_ingested(
    client: persist.Client, git: Git, key: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    git.run("config", key, said)
    (git.path / "order").write_text("z*\na*\n")
    git.write("a", "text\n" * 20)
    git.write("ü", "1")
    git.commit("Grüße")
    git.run("mv", "a", "z")
    git.commit()
    other = Git.init(git.path.with_name("other"))
    hostile = {"GIT_DIR": str(other.path / ".git"), "GIT_WORK_TREE": str(other.path), "GIT_INDEX_FILE": "/nonexistent",
               "GIT_EXTERNAL_DIFF": "false", "GIT_DIFF_OPTS": "--stat", "GIT_NAMESPACE": "elsewhere",
               "GIT_OBJECT_DIRECTORY": str(other.path), "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "diff.relative",
               "GIT_CONFIG_VALUE_0": "true", "GIT_SHALLOW_FILE": "/nonexistent", "LC_ALL": "de_DE.UTF-8"}  # fmt: skip
    for name, value in hostile.items():
        monkeypatch.setenv(name, value)
    assert ingest_all(client, git).updates == 5
    with client.open_reader("git_history_commits") as read:
        first = read.snapshot(as_of=0, diff=True).to_arrow().to_pylist()[0]
    assert first["subject"] == "Grüße".encode()
    assert first["authored"] == 1_600_000_000


def test_commit_objects_made_by_hand_are_ingested_too(client: persist.Client, git: Git) -> None:
    git.write("a", "1")
    parent = git.commit()
    tree = git.run("rev-parse", "HEAD^{tree}")
    for author, message in ((b"a <a@x> never", b"one\0//two"), (b"a <a@x> 5 +0000", b""), (b"<> 9", b"\xff\n\rlate")):
        head = f"tree {tree}\nparent {parent}\n".encode() + b"author " + author + b"\ncommitter a <a@x> 1 +0000\n\n"
        parent = git.run("hash-object", "-t", "commit", "-w", "--stdin", "--literally", stdin=head + message)
        git.run("update-ref", "refs/heads/main", parent)
    assert ingest_all(client, git).upper == 4
    with client.open_reader("git_history_commits") as read:
        rows = read.snapshot(as_of=3, diff=True).to_arrow().sort_by("position").to_pylist()
    assert [row["authored"] for row in rows[1:3]] == [None, 5]
    assert rows[2]["subject"] == b""


def test_hundreds_of_small_appends_with_empty_ones_among_them_are_kept(client: persist.Client, git: Git) -> None:
    git.fast_import(4, 250, changes=60)
    done = ingest(client, Repository(git.path), max_commits=1)
    assert done.appends == 250
    with client.open_reader("git_history") as read:
        verify(read, Repository(git.path), spread(5, 0, 250))
    parts = [part for batch in client.inspect("git_history").state.trace for part in batch.parts]
    assert any(part.inline is None for part in parts), "make the history larger: nothing had to leave the state"


@pytest.mark.parametrize("seed", range(3))
def test_generated_histories_are_git_s_at_every_commit(client: persist.Client, git: Git, seed: int) -> None:
    git.fast_import(seed, 80)
    ingest_all(client, git, max_commits=random.Random(seed).choice((1, 7, 50)))


def test_a_second_run_changes_nothing_and_a_third_adds_only_what_is_new(client: persist.Client, git: Git) -> None:
    git.fast_import(5, 30)
    assert ingest_all(client, git).lower == 0
    before = [client.inspect(name).state.trace for name in client.shards()]
    assert ingest(client, Repository(git.path)) == Ingested(30, 30, 0, 0)
    assert before == [client.inspect(name).state.trace for name in client.shards()]
    git.run("reset", "-q", "--hard")
    git.write("new", "1")
    git.commit()
    assert ingest_all(client, git) == Ingested(30, 31, appends=1, updates=1)


def test_a_limit_stops_early_and_the_next_run_goes_on(client: persist.Client, git: Git) -> None:
    git.fast_import(6, 20)
    for lower in range(0, 20, 6):
        done = ingest(client, Repository(git.path), limit=6)
        assert (done.lower, done.upper) == (lower, min(lower + 6, 20))
    check_every_commit(client, git, 20)


def test_a_rewritten_history_is_refused_with_the_position_where_it_departs(client: persist.Client, git: Git) -> None:
    ids = []
    for text in "abcde":
        git.write(text, text)
        ids.append(git.commit())
    ingest_all(client, git)
    git.run("reset", "-q", "--hard", ids[2])
    git.write("x", "instead")
    instead = git.commit()
    with pytest.raises(OtherSource, match="holds 5 commits, the repository has 4"):
        ingest(client, Repository(git.path))
    for text in "yz":
        git.write(text, text)
        git.commit()
    with pytest.raises(OtherSource, match=f"position 3 is commit {ids[3]} in the shard and {instead}") as refused:
        ingest(client, Repository(git.path))
    assert "--shard" in str(refused.value)
    with client.open_reader("git_history") as read:
        assert read.fetch_upper() == persist.at(5)


def test_of_two_ingestions_at_once_one_is_told_and_nothing_is_doubled(client: persist.Client, git: Git) -> None:
    git.fast_import(13, 12)

    def rival(append: Append) -> None:
        if append.upper == 4:
            ingest(client, Repository(git.path), max_commits=3, limit=6)

    with pytest.raises(persist.UpperMismatch):
        ingest(client, Repository(git.path), max_commits=2, on_append=rival)
    assert ingest(client, Repository(git.path)).lower == 10
    check_every_commit(client, git, 12)


@pytest.mark.parametrize("lagging", ["git_history", "git_history_commits"])
def test_a_kill_between_the_two_appends_is_repaired(
    client: persist.Client, git: Git, lagging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    git.fast_import(7, 12)
    original = git_history._Half.append

    def append(self: git_history._Half, table: object, upper: int, own: int) -> int:
        if self.write.shard == lagging and upper > 6:
            raise KeyboardInterrupt
        return original(self, table, upper, own)

    monkeypatch.setattr(git_history._Half, "append", append)
    swapped = git_history._append
    if lagging == "git_history_commits":
        # A record that was lost, as commits are appended first: the trees still tell whether the history is the same.
        monkeypatch.setattr(git_history, "_append", _files_first)
    with pytest.raises(KeyboardInterrupt):
        ingest(client, Repository(git.path), max_commits=3)
    uppers = {name: client.inspect(name).state.upper.time for name in client.shards()}
    assert uppers.pop(lagging) == 6
    assert list(uppers.values()) == [9]
    monkeypatch.setattr(git_history._Half, "append", original)
    monkeypatch.setattr(git_history, "_append", swapped)
    # Other bounds than before the kill.
    done = ingest(client, Repository(git.path), max_commits=5)
    assert (done.lower, done.upper, done.appends) == (6, 12, 2)
    check_every_commit(client, git, 12)


def _files_first(
    append: Append, files: git_history._Half, commits: git_history._Half, uppers: tuple[int, int]
) -> tuple[int, int]:
    held = files.append(append.files, append.upper, uppers[0])
    return held, commits.append(append.commits, append.upper, uppers[1])


def test_trees_without_a_record_are_only_continued_by_their_own_history(client: persist.Client, git: Git) -> None:
    git.fast_import(8, 6)
    ingest_all(client, git)
    other = Git.init(git.path.with_name("other"))
    other.fast_import(9, 6)
    write, _ = client.open_shard("unrecorded", FILES)
    rows = [{"path": path, "mode": mode, "object": id_, "_time": 0, "_diff": 1}
            for path, (mode, id_) in contents(client, 2).items()]  # fmt: skip
    write.compare_and_append(rows, 0, 3)
    with pytest.raises(Differs):
        ingest(client, Repository(other.path), "unrecorded")
    assert ingest(client, Repository(git.path), "unrecorded").upper == 6


@pytest.mark.parametrize(("path", "diff"), [(b"a", -1), (b"a", 1), (b"c", 1)])
def test_verification_finds_a_path_too_few_one_twice_and_one_too_many(
    client: persist.Client, git: Git, path: bytes, diff: int
) -> None:
    git.write("a", "1")
    git.write("b", "2")
    git.commit()
    ingest_all(client, git)
    git.commit("empty")
    mode, object_ = contents(client, 0)[b"a"]
    planted = {"path": path, "mode": mode, "object": object_, "_time": 1, "_diff": diff}
    write, read = client.open_shard("git_history", FILES)
    write.compare_and_append([planted], 1, 2)
    assert verify(read, Repository(git.path), [0]) == 2
    with pytest.raises(Differs, match=r"at position 1, commit \w+: [12] entries differ; path") as differs:
        verify(read, Repository(git.path), [0, 1])
    assert repr(path) in str(differs.value)


def test_a_commit_that_git_cannot_read_stops_there_and_loses_nothing(client: persist.Client, git: Git) -> None:
    trees = []
    for text in "abcdef":
        git.write("file", text)
        git.commit()
        trees.append(git.run("rev-parse", "HEAD^{tree}"))
    damaged = git.path / ".git/objects" / trees[4][:2] / trees[4][2:]
    hidden = git.path / "hidden"
    damaged.rename(hidden)
    with pytest.raises(GitFailed, match=trees[4]):
        ingest(client, Repository(git.path), max_commits=1)
    assert client.inspect("git_history").state.upper.time in {3, 4}
    hidden.rename(damaged)
    ingest_all(client, git)


def test_positions_to_verify_are_spread_over_all_that_can_be_read() -> None:
    assert spread(3, 0, 11) == [0, 5, 10]
    assert spread(20, 4, 8) == [4, 5, 6, 7]
    assert spread(1, 0, 10) == [9]
    assert spread(5, 0, 0) == []


def command(location: Path, git: Git, *options: str) -> list[str]:
    module = [sys.executable, "-m", "examples.git_history"]
    return [*module, "--location", f"file:{location}", "--repo", str(git.path), *options]


def test_the_command_ingests_verifies_and_says_so(tmp_path: Path, git: Git, capfd: pytest.CaptureFixture[str]) -> None:
    git.fast_import(10, 25)
    arguments = ["--repo", str(git.path), "--location", f"file:{tmp_path / 'data'}", "--commits-per-append", "1"]
    assert git_history.main([*arguments, "--every"]) == 0
    said = capfd.readouterr().out
    assert "25 commits" in said
    assert "25 appends" in said
    assert "25 snapshots equal git ls-tree" in said


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--repo", "/"], 1, "not a git repository"),
        (["--repo", "/nonexistent"], 1, "/nonexistent"),
        (["--rev", "no-such-branch"], 1, "no-such-branch"),
        (["--rev=--all"], 1, "--all"),
        (["--shard", "no/such name"], 1, "no/such name"),
        (["--location", "gopher://x"], 1, "gopher"),
    ],
)
def test_failures_are_sentences_and_exit_codes(
    tmp_path: Path, git: Git, options: list[str], code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    git.commit()
    arguments = ["--repo", str(git.path), "--location", f"file:{tmp_path / 'data'}", *options]
    assert git_history.main(arguments) == code
    errors = capfd.readouterr().err
    assert said in errors
    assert "Traceback" not in errors


def test_another_history_exits_with_3_and_wrong_contents_with_4(
    tmp_path: Path, git: Git, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--repo", str(git.path), "--location", f"file:{tmp_path / 'data'}"]
    git.write("a", "1")
    git.commit()
    assert git_history.main(arguments) == 0
    git.run("commit", "-q", "--amend", "-m", "rewritten")
    assert git_history.main(arguments) == 3
    git.run("reset", "-q", "--hard", "HEAD@{1}")
    git.write("b", "1")
    git.commit()
    with persist.open(f"file:{tmp_path / 'data'}") as client:
        client.open_writer("git_history", FILES).compare_and_append([], 1, 2)
    assert git_history.main([*arguments, "--every"]) == 4
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_killed_at_random_moments_nothing_is_lost_or_doubled(tmp_path: Path, git: Git) -> None:
    git.fast_import(11, 300)
    chance, uppers = random.Random(11), [0]
    with persist.open(f"file:{tmp_path / 'data'}") as client:
        while len(uppers) < 9 and uppers[-1] < 280:
            run = subprocess.Popen(command(tmp_path / "data", git, "--commits-per-append", "1"), cwd=ROOT)
            wait_until_beyond(client, uppers[-1])
            time.sleep(chance.random() * 0.2)
            run.kill()
            assert run.wait() in {-signal.SIGKILL, 0}
            uppers.append(upper(client))
        assert len([upper for upper in uppers if upper < 300]) > 3, "too few of the runs were killed half-way"
        assert ingest(client, Repository(git.path)).upper == 300
        check_every_commit(client, git, 300)


def upper(client: persist.Client) -> int:
    return client.inspect("git_history").state.upper.time or 0 if "git_history" in client.shards() else 0


def wait_until_beyond(client: persist.Client, before: int) -> None:
    deadline = time.monotonic() + 60
    while upper(client) <= before:
        assert time.monotonic() < deadline, "nothing is ingested"
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_long_history_is_ingested_in_minutes_and_bounded_memory(tmp_path: Path) -> None:
    git = Git.init(tmp_path / "large", "--bare")
    git.fast_import(12, COMMITS, changes=7)
    begun = time.monotonic()
    run = subprocess.Popen(command(tmp_path / "data", git), cwd=ROOT)
    _, status, used = os.wait4(run.pid, 0)
    run.returncode = os.waitstatus_to_exitcode(status)
    assert run.returncode == 0
    seconds, peak_mb = time.monotonic() - begun, used.ru_maxrss / 1024  # git's own memory included
    with persist.open(f"file:{tmp_path / 'data'}") as client, client.open_reader("git_history") as read:
        assert read.upper == persist.at(COMMITS)
        updates = sum(batch.count for batch in client.inspect("git_history").state.trace)
        paths = verify(read, Repository(git.path), spread(20, 0, COMMITS))
    print(f"{COMMITS / seconds:.0f} commits/s, {updates} updates, {paths} paths compared, peak {peak_mb:.0f} MB")
    assert updates > 10 * COMMITS
    assert seconds < 600
    assert peak_mb < 1024
