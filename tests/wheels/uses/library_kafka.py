"""A topic as a source: the broker that the client library has is started beside."""

import sys

from confluent_kafka import Producer

import persist_lib as persist
from persist_lib.sources import Kafka, Meaning
from persist_lib.testing.kafka_server import KafkaServer

schema = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
with KafkaServer() as server, persist.open(f"file:{sys.argv[1]}/data") as client:
    server.create("words", 2)
    producer = Producer({"bootstrap.servers": server.brokers, "log_level": 0})
    for n in range(100):
        producer.produce("words", b'{"id": %d, "word": "w"}' % n)
    producer.flush()
    sources = client.controller().sources()
    sources.create("words", Kafka(brokers=server.brokers, topic="words"), schema, meaning=Meaning(envelope="upsert"))
    sources.run("words", until_idle=True)
    with client.controller().open_reader("words") as read:
        assert read.snapshot().to_arrow().num_rows == 100
