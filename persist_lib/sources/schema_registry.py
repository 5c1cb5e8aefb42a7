"""A registry of Avro schemas, from outside: a folder, or Confluent's HTTP protocol. What it says is not definite.

So no process decodes by what it says: the first answer is committed, and read back from there (`Schemas`).
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

import msgspec

from persist_lib.arguments import UNREADABLE, parse_text, shown
from persist_lib.catalog.metadata_shard import Bodies
from persist_lib.client import Client
from persist_lib.config import MIB
from persist_lib.errors import Determinate, Diverged, InvalidUsage
from persist_lib.runtime.ambient import Deadline
from persist_lib.schema.schema import DIFF, Schema

ANSWER_S = 10.0
LONGEST = 16 * MIB
UNKNOWN = "not known to the registry"
"""The kind of a schema that there is not."""
DEEPEST = 20
"""References of references that are followed."""
REFERENCES_MOST = 1000
"""How many schemas one may refer to, in all: each is a request, and what a registry answers is not believed."""


ENVIRONMENT = "env:"


def from_environment(value: str, what: str, **fields: object) -> str:
    """What is declared as `env:NAME` is in the variable NAME; else it is the value. Raises InvalidUsage for a gap."""
    if not value.startswith(ENVIRONMENT):
        return value
    variable = value.removeprefix(ENVIRONMENT)
    taken = os.environ.get(variable)  # noqa: TID251 - an edge: secrets are where the source runs
    if taken is None:
        raise InvalidUsage(
            f"{what} is to come from the environment variable {variable}, which is not set here. Set it where the "
            "source runs",
            **fields,
        )
    return taken


def check_secret(value: str, what: str) -> None:
    """Refuse a secret that would be stored, as all that is declared is."""
    if not value.startswith(ENVIRONMENT):
        raise InvalidUsage(
            f'{what} is a secret, and what is declared is stored: pass "env:NAME", and set the environment variable '
            "NAME wherever the source runs"
        )
    if not value.removeprefix(ENVIRONMENT).isidentifier():
        raise InvalidUsage(f"{what} must name an environment variable, as in env:KAFKA_PASSWORD")


class Written(NamedTuple):
    """A schema that messages were written with: its text, and the texts of those that it refers to, in order."""

    text: str
    references: tuple[str, ...] = ()
    kind: str = "AVRO"


class _Reference(msgspec.Struct):
    """A schema to which another one refers, as a registry says it."""

    name: str
    subject: str
    version: int


class Registry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where the schemas of messages are that begin with 0 and the id of theirs, as Confluent's clients write them.

    `place` is the URL of a registry, or a folder with a file `ID.avsc` for each. `password` is "env:NAME": what is
    declared is stored. With `unknown="wait"` a message of a schema that the registry does not know is waited for;
    with "error" it is bad, for ever.
    """

    place: str
    user: str | None = None
    password: str | None = None
    unknown: Literal["wait", "error"] = "wait"

    def __post_init__(self) -> None:
        if not parse_text(self.place, "place", 4096):
            raise InvalidUsage("place must be the URL of a registry, or a folder: got ''")
        if self.is_http and ("@" in (host := _host(self.place)) or not host):
            raise InvalidUsage('the URL of a registry has no user in it: pass user= and password="env:NAME"')
        if (self.user is None) != (self.password is None):
            raise InvalidUsage("user and password of a registry go together")
        if self.password is not None:
            check_secret(str(self.password), "the password of a registry")
        if self.unknown not in {"wait", "error"}:
            raise InvalidUsage(f'unknown must be "wait" or "error": got {shown(self.unknown)}')

    @property
    def is_http(self) -> bool:
        return self.place.startswith(("http://", "https://"))

    def fetch(self, id_: int) -> Written:
        """What it says now. Raises Determinate where it does not answer, or waits for a schema to be made."""
        found = self._over_http(id_) if self.is_http else self._in_folder(id_)
        if found is not None:
            return found
        if self.unknown == "error":
            return Written("", (), UNKNOWN)
        raise self._failed(id_, "it knows no such schema. A message names it; register it, or declare unknown='error'")

    def _in_folder(self, id_: int) -> Written | None:
        folder = Path(self.place)
        try:
            return Written((folder / f"{id_}.avsc").read_text())
        except FileNotFoundError:
            if folder.is_dir():
                return None
            raise self._failed(id_, "there is no such folder") from None
        except (OSError, UnicodeDecodeError) as error:
            raise self._failed(id_, str(error)) from error

    def _over_http(self, id_: int) -> Written | None:
        answer = self._get(id_, f"schemas/ids/{id_}")
        if answer is None:
            return None
        kind, text = answer.get("schemaType", "AVRO"), answer.get("schema")
        if not isinstance(text, str) or not isinstance(kind, str):
            raise self._failed(id_, "its answer has no schema")
        found: dict[str, str] = {}
        self._follow(id_, answer, found, 0)
        return Written(text, tuple(found.values()), kind)

    def _follow(self, id_: int, answer: dict[str, Any], found: dict[str, str], depth: int) -> None:
        """The schemas that an answer refers to, before those that refer to them."""
        try:
            references = msgspec.convert(answer.get("references") or [], list[_Reference])
        except msgspec.ValidationError as error:
            raise self._failed(id_, f"its references cannot be read: {error}") from None
        for one in references:
            if one.name in found:
                continue
            other = self._get(id_, f"subjects/{quote(one.subject, safe='')}/versions/{one.version}")
            if other is None or depth > DEEPEST or len(found) >= REFERENCES_MOST:
                raise self._failed(id_, f"it refers to {one.name}, which is not there, or to too many")
            if not isinstance(text := other.get("schema"), str):
                raise self._failed(id_, f"its answer has no schema of {one.name}")
            self._follow(id_, other, found, depth + 1)
            found[one.name] = text

    def _get(self, id_: int, path: str) -> dict[str, Any] | None:
        request = Request(f"{self.place.rstrip('/')}/{path}", headers=self._headers())  # noqa: S310 - its scheme is checked
        try:
            with urlopen(request, timeout=ANSWER_S) as answer:  # noqa: S310 - the same
                found = msgspec.json.decode(answer.read(LONGEST))
        except HTTPError as error:
            if error.code == 404:
                return None
            raise self._failed(id_, f"it answers {error.code} {error.reason}") from None
        except (URLError, HTTPException, OSError, ValueError, *UNREADABLE) as error:
            raise self._failed(id_, f"it does not answer: {error}") from None
        if not isinstance(found, dict):
            raise self._failed(id_, "its answer is no object")
        return found

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/vnd.schemaregistry.v1+json, application/json"}
        if self.password is not None:
            taken = from_environment(self.password, "the registry's password")
            headers["Authorization"] = f"Basic {base64.b64encode(f'{self.user}:{taken}'.encode()).decode()}"
        return headers

    def _failed(self, id_: int, why: str) -> Determinate:
        return Determinate(f"schema {id_} of the registry {self.place}: {why}", schema=id_)


def _host(place: str) -> str:
    try:
        return urlsplit(place).netloc
    except ValueError:  # no address, as it is written
        return ""


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
        self._bodies.close()

    def _compare(self, id_: int) -> None:
        """See whether the registry says today what is committed. It need not answer."""
        if self._known[id_].kind == UNKNOWN:  # and it stays so, also if it is registered later
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
