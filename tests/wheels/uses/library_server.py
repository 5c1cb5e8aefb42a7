"""A shard server, and a client of it, in one process."""

import sys

import persist_lib as persist
from persist_lib.server.shard_server import ShardServer

schema = persist.Schema(key={"id": "int64"}, value={"word": "string"})
with persist.open(f"file:{sys.argv[1]}/data") as store:
    server = ShardServer(store, "127.0.0.1:0")
    port = server.start()
    with persist.open(store.url, consensus=f"persist://127.0.0.1:{port}") as client:
        write, read = client.open_shard("orders", schema)
        write.compare_and_append([{"id": 1, "word": "w"}], 0, 1)
        assert [row["id"] for row in read.snapshot(as_of=0).to_pylist()] == [1]
    server.stop()
