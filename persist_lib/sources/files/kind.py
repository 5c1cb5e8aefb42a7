"""Files as sources: what is declared of them, and the reader that this makes."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from persist_lib.arguments import parse_flag, parse_text, shown
from persist_lib.errors import InvalidUsage
from persist_lib.location.objects.target import CLOUDS
from persist_lib.sources.decoding import DECODERS, Decoding
from persist_lib.sources.files.folders import open_folder
from persist_lib.sources.files.parquet import ParquetFiles
from persist_lib.sources.files.reader import Identity, LineFiles
from persist_lib.sources.protocol import SourceReader
from persist_lib.sources.records import DECODED, Declaration, Kind, Place

Format = Literal["jsonl", "csv", "text", "parquet", "avro"]
SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson", ".json"), "csv": (".csv", ".tsv", ".txt"), "text": (".log", ".txt"),
    "parquet": (".parquet",), "avro": (".avro",),
}  # fmt: skip


class Files(
    Kind, msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="files", forbid_unknown_fields=True
):
    """Files in a folder of this machine, or below `s3://bucket/prefix/?options` (or `gs:`, `az:`).

    `format` says what a message is: a line ("jsonl", "csv", "text"), or a row ("parquet", "avro"). `suffixes` are the
    endings of the names that are read, without `.gz` and `.zst`. `identity`: see `reader`. With `header` a CSV file's
    first line names its columns. With `may_grow=False` files are complete as they are, and their last line needs no
    end; objects of S3 and packed files always are.
    """

    title = "files"
    schemes = (*CLOUDS, "file")
    takes = DECODED | {"format", "add-columns"}
    hint = "of files, give --format"

    place: str
    format: Format
    suffixes: tuple[str, ...] = ()
    identity: Identity = "path"
    header: bool = True
    may_grow: bool = True

    def __post_init__(self) -> None:
        if not parse_text(self.place, "place", 4096):
            raise InvalidUsage("place must be a folder or an s3://, gs:// or az:// prefix: got ''")
        if self.format not in get_args(Format):
            raise InvalidUsage(f"format must be one of {get_args(Format)}: got {shown(self.format)}")
        if self.identity not in get_args(Identity):
            raise InvalidUsage(f"identity must be one of {get_args(Identity)}: got {shown(self.identity)}")
        if self.format in {"parquet", "avro"} and self.identity != "path":
            raise InvalidUsage(f'{self.format} files are known by their paths: leave out identity="first line"')
        if not isinstance(self.suffixes, tuple) or not all(isinstance(one, str) and one for one in self.suffixes):
            raise InvalidUsage(f"suffixes must be a tuple of texts such as ('.jsonl',): got {shown(self.suffixes)}")
        parse_flag(self.header, "header")
        parse_flag(self.may_grow, "may_grow")

    @classmethod
    def of_place(cls, place: Place) -> tuple[Files, str]:
        if place.format is None:
            raise InvalidUsage("say --format: jsonl, csv, text, parquet or avro")
        how: Any = place.format
        return cls(place=place.url, format=how), DECODERS[how]

    def default_decoding(self) -> Decoding:
        return Decoding(decoder=DECODERS[self.format])

    def check(self, given: Declaration) -> None:
        if self.format == "parquet" and given.meaning.keep_raw:
            raise InvalidUsage("keep_raw keeps bytes, and Parquet's messages are rows: their files are what is raw")
        if self.format == "csv" and self.identity != "path":
            raise InvalidUsage(
                'identity="first line" tells files apart by their first lines, and every CSV of one shape begins with '
                "the same: leave it out, so that each path is a file of its own"
            )
        super().check(given)

    def open(self) -> SourceReader:
        """A reader of these files. Raises NotFound for a folder that is not there."""
        folder = open_folder(self.place)
        suffixes = tuple(one.lower() for one in self.suffixes) or SUFFIXES[self.format]
        if self.format == "parquet":
            return ParquetFiles(folder, suffixes)
        if self.format == "avro":
            from persist_lib.sources.files.avro import AvroFiles  # noqa: PLC0415 - fastavro is an extra

            return AvroFiles(folder, suffixes, identity="path", header=False, may_grow=self.may_grow)
        header = self.format == "csv" and self.header
        return LineFiles(folder, suffixes, identity=self.identity, header=header, may_grow=self.may_grow)
