r"""Event logs on S3: `s3:URL`, as in `s3:s3\://bucket/ledger`, with the options of a location's URL.

An event is one conditional PUT. See `events.conditional`.
"""

from __future__ import annotations

from collections.abc import Sequence

from persist_lib.errors import InvalidUsage, NotFound
from persist_lib.events.api import Kind, Opening
from persist_lib.events.conditional import ConditionalRecords
from persist_lib.events.stores.shared import encode_meta, open_meta
from persist_lib.location.object_store import Object
from persist_lib.location.s3.client import parse_url
from persist_lib.location.s3.objects import S3Objects, create_marker

MARKER = "events.json"
LIMIT = 64 << 20


def open_s3(options: Sequence[str], opening: Opening) -> ConditionalRecords:
    """Open a log: `s3:URL`."""
    if len(options) != 1 or not options[0].startswith("s3://"):
        raise InvalidUsage(
            r"a store of events on S3 is s3:URL, with \: for each colon in the URL, as in s3:s3\://bucket/ledger"
        )
    objects = S3Objects(parse_url(options[0]))
    try:
        found = objects.get(MARKER, f"read {MARKER!r}")
        if found is None:
            if not opening.create:
                raise NotFound(f"there is no event log at {objects.where}. Check the URL; a writer makes one")
            found = _create(objects, opening)
        meta = open_meta(found.data, objects.where)
        return ConditionalRecords(objects, meta, LIMIT, objects.where, opening.runtime)
    except BaseException:
        objects.close()
        raise


def _create(objects: S3Objects, opening: Opening) -> Object:
    """Make the marker. Another writer may have made it before."""
    there, _ = objects.page("", "list ''", page=1)
    if there and there[0].name != MARKER:
        raise InvalidUsage(
            f"{objects.where} holds other objects ({there[0].name}), and no event log. Choose another prefix"
        )
    create_marker(objects, MARKER, encode_meta(opening.runtime), objects.where, replaces=True)
    found = objects.get(MARKER, f"read {MARKER!r}")
    if found is None:
        raise NotFound(f"{MARKER} of {objects.where} was deleted while the event log was made")
    return found


KIND = Kind(open_s3, r"a URL of S3 with \: for each colon")
