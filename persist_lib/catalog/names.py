"""Names of collections, which people choose, and of the shards behind them, which are minted.

SUBTLE: a shard is never named after its collection. A shard that is gone stays a tombstone, and a collection's name
must be free again once the collection is dropped.
"""

from __future__ import annotations

import re

from persist_lib.arguments import shown
from persist_lib.errors import InvalidName

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
LONGEST = 200
COMMAND = re.compile(r"[!-~]{1,200}")

LAYER, OF_SOURCES, OF_CATALOGS = "collection", "source", "catalog"
"""As which layer (`core.holds`) a shard is written: those of collections and tables, of sources, and the catalogs."""
HOLD = "collection"
"""The durable hold that each shard of a collection has from its creation on."""


def parse_collection_name(name: object) -> str:
    """Check that `name` can be a collection's: words as those of shards, several of them with `/` in between."""
    if not isinstance(name, str) or len(name) > LONGEST or not NAME.fullmatch(name):
        raise InvalidName(
            f"a collection's name must be 1 to {LONGEST} letters, digits, '_', '-', '.' or '/', and no part of it "
            f"between '/' may be empty or start with '-' or '.': got {shown(name)}",
            name=name,
        )
    return str(name)


def parse_command_id(command: object) -> str:
    """Check that `command` can name a command: 1 to 200 printable letters of ASCII, without spaces."""
    if not isinstance(command, str) or not COMMAND.fullmatch(command):
        raise InvalidName(
            f"a command's id is 1 to 200 printable letters of ASCII without spaces: got {shown(command)}", name=command
        )
    return str(command)


def minted(entropy: int) -> str:
    """The id of a new collection."""
    return f"c{entropy:016x}"


def rendition_shard(collection: str) -> str:
    """The shard that says which rendition is the collection, from when on."""
    return f"{collection}.renditions"


def marks_name(collection: str) -> str:
    """The name of the table of deleted keys with this id. It is minted, so that another table's rename needs none."""
    return f"deleted-keys/{collection}"


def data_shard(collection: str, rendition: int, index: int) -> str:
    """One of a rendition's shards."""
    return f"{collection}.r{rendition}.s{index}"


def member_of(collection: str, epoch: int = 0) -> str:
    """What a shard is as a place of a collection.

    In the epoch 0 it is that of a shard that was promoted; in the next one that of all its shards, since it joined a
    timeline.
    """
    return f"{collection}/{epoch}"


def kept_shard(collection: str, rendition: int) -> str:
    """The shard with kept differences between a rendition and those that may follow it."""
    return f"{collection}.r{rendition}.kept"
