"""Files of Avro as a source."""

import sys
from pathlib import Path

import fastavro

import persist_lib as persist
from persist_lib.sources import Files

folder = Path(sys.argv[1]) / "in"
folder.mkdir()
written = {
    "type": "record",
    "name": "Word",
    "fields": [{"name": "id", "type": "long"}, {"name": "word", "type": "string"}],
}
with (folder / "words.avro").open("wb") as file:
    fastavro.writer(file, fastavro.parse_schema(written), [{"id": n, "word": "w"} for n in range(100)], codec="deflate")
schema = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
with persist.open(f"file:{sys.argv[1]}/data") as client:
    sources = client.controller().sources()
    sources.create("words", Files(place=str(folder), format="avro"), schema)
    sources.run("words", until_idle=True)
    with client.controller().open_reader("words") as read:
        assert read.snapshot().to_arrow().num_rows == 100
