"""A Kafka broker for trials and tests: librdkafka's own, which speaks the real protocol and keeps messages in memory.

    with KafkaServer() as kafka:
        kafka.create("orders", 6)
        … bootstrap.servers = kafka.brokers

It is a process of its own, on the loopback interface, and ends with the one that started it. A partition keeps some
5 MB, as they were sent. What it cannot do: it does not hold back messages of open transactions.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self


class KafkaServer:
    """A broker process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.brokers = str(self._ask("brokers"))

    def create(self, topic: str, partitions: int) -> None:
        self._ask("topic_create", topic, partitions)

    def delete(self, topic: str) -> None:
        self._ask("topic_delete", topic)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Delete the messages before an offset, as retention does."""
        self._ask("partition_delete_records", topic, partition, before)

    def elect(self, topic: str, partition: int) -> None:
        """Give a partition a leader of the next epoch: the same broker."""
        self._ask("partition_set_leader", topic, partition, -1)
        self._ask("partition_set_leader", topic, partition, 1)

    def fail(self, api: int, *errors: int) -> None:
        """Answer the next requests of a kind (its number in Kafka's protocol) with these errors' numbers."""
        self._ask("push_request_errors_array", api, *errors)

    def set_up(self, *, is_up: bool) -> None:
        """Cut all connections and refuse new ones; or listen again."""
        self._ask("broker_set_up" if is_up else "broker_set_down")

    def close(self) -> None:
        """End the process. Idempotent."""
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _ask(self, *words: object) -> object:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if answer["error"]:
            raise RuntimeError(f"{words}: the broker answers {answer}")
        return answer["said"]


class _Library:
    """librdkafka, as the wheel of confluent-kafka has it: its mock cluster has no door in Python."""

    def __init__(self) -> None:
        import confluent_kafka  # noqa: PLC0415 - an extra

        folder = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
        self._library: Any = ctypes.CDLL(str(next(folder.glob("librdkafka*.so*"))))
        pointer, said = ctypes.c_void_p, ctypes.create_string_buffer(512)
        for name in ("conf_new", "new", "mock_cluster_new"):
            self._function(name).restype = pointer
        configuration = pointer(self._function("conf_new")())
        # A client needs the name of some broker, and logs else that it has none.
        self._function("conf_set")(configuration, b"bootstrap.servers", b"127.0.0.1:1", said, 512)
        self._function("conf_set")(configuration, b"log_level", b"0", said, 512)
        client = pointer(self._function("new")(0, configuration, said, 512))
        self._cluster = pointer(self._function("mock_cluster_new")(client, 1))
        self._function("mock_set_controller_id")(self._cluster, 1)

    def _function(self, name: str) -> Any:
        return getattr(self._library, f"rd_kafka_{name}")

    def call(self, name: str, *words: Any) -> tuple[int, object]:
        """Call a function of the mock cluster. Answers its error's number, and what it says."""
        if name == "brokers":
            find = self._function("mock_cluster_bootstraps")
            find.restype = ctypes.c_char_p
            return 0, find(self._cluster).decode()
        given: list[Any] = [word.encode() if isinstance(word, str) else word for word in words]
        match name:
            case "topic_create":
                given.append(1)
            case "partition_delete_records":
                given[2] = ctypes.c_int64(given[2])
            case "broker_set_up" | "broker_set_down":
                given.append(1)
            case "push_request_errors_array":
                given = [given[0], ctypes.c_size_t(len(words) - 1), (ctypes.c_int * (len(words) - 1))(*words[1:])]
            case _:
                pass
        function = self._function(f"mock_{name}")
        if name == "push_request_errors_array":
            function.restype = None
            function(self._cluster, *given)
            return 0, None
        return int(function(self._cluster, *given)), None


def serve() -> None:
    """Answer each line of standard input, until it ends."""
    library = _Library()
    for line in sys.stdin:
        error, said = library.call(*json.loads(line))
        sys.stdout.write(json.dumps({"error": error, "said": said}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
