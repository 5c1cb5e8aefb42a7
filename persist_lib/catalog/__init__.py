"""Collections: definite data under one name that outlives the shards it is kept in.

A collection is one rendition at each time. A rendition is a fixed number of shards, to which rows go by a hash of their
key. All that this layer knows is itself in shards: the catalog (what collections there are), and for each collection
its rendition shard (which rendition is the collection, from when on). Everything here stands on the public face of
clients and handles, and on the pure kernel.
"""

from __future__ import annotations

from persist_lib.catalog.controller import Controller
from persist_lib.catalog.describe import Capability, Description, RenditionDescription
from persist_lib.catalog.reader import CollectionReader
from persist_lib.catalog.writer import CollectionWriter

__all__ = ["Capability", "CollectionReader", "CollectionWriter", "Controller", "Description", "RenditionDescription"]
