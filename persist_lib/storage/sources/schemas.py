"""The schemas of a source's messages: a shard, in which the first answer of the registry for each id stays for ever.

SUBTLE: an instance that asked the registry uses what it reads back, which may be the answer that another one got.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from persist_lib.client import Client
from persist_lib.errors import Determinate, Diverged
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import DIFF, Schema
from persist_lib.storage.metadata_shard import Bodies
from persist_lib.storage.sources.registry import UNKNOWN, Registry, Written

SCHEMA = Schema(key={"id": "int64 not null"}, value={"body": "string not null"}, times="ms", unique=True)


class Schemas:
    """One process's view of them."""

    def __init__(self, client: Client, shard: str, registry: Registry) -> None:
        self._bodies, self._registry = Bodies(client, shard, SCHEMA, f"schemas {shard}"), registry
        self._known: dict[int, Written] = {}
        self._compared: set[int] = set()

    def learn(self, ids: Iterable[int], deadline: Deadline) -> dict[int, Written]:
        """The schemas of these ids, and perhaps others, as they are committed; those that are not are asked for.

        Raises Determinate where the registry has to answer and does not, and Diverged where it says something else
        than it did.
        """
        wanted = set(ids) - self._compared
        if wanted - set(self._known):
            self._known |= self._fetch()
        for id_ in sorted(wanted):
            if id_ not in self._known:
                self._commit(id_, self._registry.fetch(id_), deadline)
                self._known |= self._fetch()
            else:
                self._compare(id_)
            self._compared.add(id_)
        return self._known

    def close(self) -> None:
        """Close what it has open. Idempotent."""
        self._bodies.close()

    def _compare(self, id_: int) -> None:
        """See whether the registry says today what is committed. It need not answer."""
        if self._known[id_].kind == UNKNOWN:  # and it stays so, whoever registers it later
            return
        try:
            now = self._registry.fetch(id_)
        except Determinate:
            return
        if _meaning(now) != _meaning(self._known[id_]):
            raise Diverged(
                f"the registry {self._registry.place} says another schema for the id {id_} than when the source met it "
                "first. Nothing was written by the new one. The schema of an id must not change: put back the former "
                "one, or see what `persist source reset` would lose",
                schema=id_,
            )

    def _commit(self, id_: int, written: Written, deadline: Deadline) -> None:
        row = {"id": id_, "body": msgspec.json.encode(written._asdict()).decode(), DIFF: 1}
        self._bodies.change(lambda known: [] if id_ in known else [row], deadline)

    def _fetch(self) -> dict[int, Written]:
        return {id_: _decoded(body) for id_, body in self._bodies.fetch().items()}


def _decoded(body: str) -> Written:
    found = msgspec.json.decode(body)
    return Written(found["text"], tuple(found["references"]), found["kind"])


def _meaning(written: Written) -> object:
    """A schema without what is not a part of it: blanks, and the order of names."""
    texts = []
    for text in (written.text, *written.references):
        try:
            texts.append(msgspec.json.decode(text))
        except msgspec.DecodeError:
            texts.append(text)
    return texts, written.kind
