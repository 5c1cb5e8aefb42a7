"""An event log in LMDB."""

import sys

from persist_lib import events

store = events.open_store(f"lmdb:{sys.argv[1]}/log")
with store.writer() as writer:
    for number in range(1, 101):
        writer.write(number, b"%d" % number)
with store.reader() as reader:
    assert [bytes(event.payload) for event in reader.replay(99)] == [b"99", b"100"]
