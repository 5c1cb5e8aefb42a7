"""What is in a folder and is not read: it ends nothing, and is named with why. What cannot be listed is not gone."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import persist_lib as persist
from persist_lib.errors import Determinate, InvalidUsage
from persist_lib.location.s3 import objects as s3_objects
from persist_lib.sources import Decoding, Files, Sources
from persist_lib.sources.files.folders import Directory, Prefix
from persist_lib.sources.protocol import Mark, SourceReader, Unread, settled
from tests.unit.sources.test_running import Place, row
from tests.worlds import World

DATA = b"".join(b'{"id": %d}\n' % n for n in range(2000))
GOOD = b'{"id": -1}\n'


def flipped(data: bytes, at: int = -5) -> bytes:
    found = bytearray(data)
    found[at] ^= 0x10
    return bytes(found)


def make_link(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def make_not_utf8(path: Path) -> None:
    Path(os.fsdecode(os.fsencode(path.parent) + b"/caf\xe9.jsonl")).write_bytes(GOOD)


def make_denied(path: Path) -> None:
    path.write_bytes(GOOD)
    path.chmod(0)


TROUBLES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a flipped byte": (
        "a.jsonl.gz", lambda path: path.write_bytes(flipped(gzip.compress(DATA))), "cannot be unpacked from byte",
    ),
    "a flipped byte of zstd": (
        "a.jsonl.zst", lambda path: path.write_bytes(flipped(bytes(pa.compress(DATA, "zstd", asbytes=True)), 2)),
        "cannot be unpacked from byte",
    ),
    "cut": ("a.jsonl.gz", lambda path: path.write_bytes(gzip.compress(DATA)[:-9]), "cannot be unpacked from byte"),
    "no gzip at all": ("a.jsonl.gz", lambda path: path.write_bytes(GOOD), "cannot be unpacked from byte 0"),
    "no end of the last line": ("a.jsonl", lambda path: path.write_bytes(GOOD[:-1]), "from byte 0 on it has no whole"),
    "packed otherwise": ("a.jsonl.bz2", lambda path: path.write_bytes(b"x"), "is packed in a way that is not read"),
    "a pipe": ("a.jsonl", os.mkfifo, "is no plain file"),
    "a link to nothing": ("a.jsonl", make_link, "is a link to nothing"),
    "a name that is not UTF-8": ("caf\\xe9.jsonl", make_not_utf8, "its name is not UTF-8"),
    "no right to read it": ("a.jsonl", make_denied, "could not be read: Permission denied"),
}  # fmt: skip


def unread(reader: SourceReader, bound: dict[str, Mark] | None = None) -> dict[str, Unread]:
    """What the reader says once all that it reads is bound."""
    bound = {} if bound is None else bound
    while new := dict(reader.high_watermarks(bound, 1 << 20)):
        bound |= new
    assert hasattr(reader, "unread")
    return dict(reader.unread())


@pytest.mark.parametrize("what", TROUBLES)
def test_what_is_not_read_is_named_and_ends_nothing(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, make, why = TROUBLES[what]
    if what == "no right to read it" and os.geteuid() == 0:
        opened = os.open

        def denied(path: Any, flags: int, *more: Any, **other: Any) -> int:
            if str(path).endswith("/a.jsonl"):
                raise PermissionError(13, "Permission denied", str(path))
            return opened(path, flags, *more, **other)

        monkeypatch.setattr(os, "open", denied)
    (tmp_path / "b.jsonl").write_bytes(GOOD)
    make(tmp_path / name)
    for identity in ("path", "first line"):
        files = Files(place=str(tmp_path), format="jsonl", identity=identity)
        with closing(files.open()) as reader:
            bound: dict[str, Mark] = {}
            found = unread(reader, bound)
            assert list(found) == [name]
            assert why in found[name].why
            assert len(bound) >= 1
            assert unread(reader, bound) == found, "also at a look that finds nothing new"
        with closing(files.open()) as later:
            assert unread(later, bound) == found, "and of a reader that begins there"
    (tmp_path / name).unlink(missing_ok=True)
    if "\\" not in name:
        (tmp_path / name).write_bytes(gzip.compress(GOOD) if name.endswith(".gz") else b"")
        with closing(Files(place=str(tmp_path), format="jsonl").open()) as reader:
            assert not {one for one in unread(reader) if not one.endswith((".zst", ".bz2"))}


def test_what_may_still_be_written_has_a_minute(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(DATA)[:-9])
    os.utime(path, (1000, 1000))
    with closing(Files(place=str(tmp_path), format="jsonl").open()) as reader:
        found = unread(reader)
    assert settled(found, 1_030_000) == {}
    assert list(settled(found, 1_061_000)) == ["a.jsonl.gz"]
    assert list(settled({"x": Unread("it is a pipe")}, 0)) == ["x"]


@pytest.mark.parametrize("kind", ["parquet", "avro"])
def test_a_file_that_is_not_whole_is_named(tmp_path: Path, kind: str) -> None:
    good, name = tmp_path / f"b.{kind}", f"a.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"id": [1]}), good)
    else:
        fastavro = pytest.importorskip("fastavro")
        with good.open("wb") as file:
            schema = {"type": "record", "name": "r", "fields": [{"name": "id", "type": "long"}]}
            fastavro.writer(file, schema, [{"id": 1}])
    (tmp_path / name).write_bytes(good.read_bytes()[:-3])
    (tmp_path / f"{name}.bz2").write_bytes(b"x")
    with closing(Files(place=str(tmp_path), format=kind).open()) as reader:  # type: ignore[arg-type]
        found = unread(reader)
    assert sorted(found) == [name, f"{name}.bz2"]


@pytest.mark.parametrize("packing", ["", ".gz"])
def test_another_file_with_the_first_line_is_named_and_a_copy_is_not(tmp_path: Path, packing: str) -> None:
    pack = gzip.compress if packing else bytes
    (tmp_path / "app.log").write_bytes(b"begin\n1\n2\n3\n4\n")
    (tmp_path / f"app.log.1{packing}").write_bytes(pack(b"begin\n1\n2\n"))
    (tmp_path / f"app.log.2{packing}").write_bytes(pack(b"begin\nother\n"))
    with closing(Files(place=str(tmp_path), format="text", identity="first line").open()) as reader:
        found = unread(reader)
    assert {name: one.why for name, one in found.items()} == {
        f"app.log.2{packing}": "it begins with the same line as app.log, and is another file: only that one is read"
    }


def declare_csv(place: Path, decoding: Decoding | None = None, **more: Any) -> None:
    files, schema = Files(place=str(place), format="csv", **more), persist.Schema(key={"id": "int64"})
    with closing(World().client().controller()) as controller:
        Sources(controller).create("s", files, schema, decoding=decoding)


def test_of_csv_the_first_line_is_no_identity(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="every CSV of one"):
        declare_csv(tmp_path, identity="first line")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "cp037", "utf-7", "nonsense", "latin-1"])
def test_an_encoding_that_cannot_be_read_by_lines_is_refused(encoding: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidUsage, match="encoding"):
        declare_csv(tmp_path, Decoding(decoder="json" if encoding == "latin-1" else "csv", encoding=encoding))


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "shift_jis", "utf-8"])
def test_an_encoding_with_the_lines_of_ascii_is_taken(encoding: str, tmp_path: Path) -> None:
    declare_csv(tmp_path, Decoding(decoder="csv", encoding=encoding))


def test_an_instance_says_what_it_does_not_read_and_ingests_the_rest(place: Place) -> None:
    place.create()
    place.write("b.jsonl", row(1))
    damaged = place.folder / "a.jsonl.gz"
    damaged.write_bytes(flipped(gzip.compress(DATA)))
    os.utime(damaged, (0, 0))
    done = place.catch_up()
    assert list(done.unread) == ["a.jsonl.gz"]
    assert place.words()[1] == "a"
    assert list(place.sources.show("s").unread) == ["a.jsonl.gz"]
    damaged.unlink()
    place.catch_up()
    assert place.sources.show("s").unread == {}


def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "sub"
    inner.mkdir()
    (inner / "a.jsonl").write_bytes(GOOD)
    reader = Files(place=str(tmp_path), format="jsonl").open()
    bound = dict(reader.high_watermarks({}, 1 << 20))
    scan = os.scandir

    def fails(path: Any) -> Any:
        if str(path) == str(inner):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fails)
        with pytest.raises(Determinate, match=r"sub.*could not be listed"):
            reader.high_watermarks(bound, 1 << 20)
        with pytest.raises(Determinate, match="could not be listed"):
            list(Files(place=str(tmp_path), format="jsonl").open().read("sub/a.jsonl", Mark(0), bound["sub/a.jsonl"]))
    folder = Directory(str(inner))
    (inner / "a.jsonl").unlink()
    inner.rmdir()
    with pytest.raises(Determinate, match="could not be listed"):
        list(folder.list())


class Cut:
    """A client of S3 whose listings are cut short: nothing came, and no error."""

    def __getattr__(self, name: str) -> Callable[..., dict[str, Any]]:
        return lambda **_: {"ResponseMetadata": {"HTTPStatusCode": 200}}


def test_a_listing_of_s3_that_was_cut_short_is_no_empty_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_objects.Clients, "get", lambda _self: Cut())
    with pytest.raises(Determinate, match="cut short"):
        list(Prefix("s3://bucket/in/").list())
