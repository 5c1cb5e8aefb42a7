"""What a blob's key may look like: the same everywhere, so that a location can be moved to another kind of store.

A key is 1 to 1024 bytes of UTF-8: segments separated by `/`, each of 1 to 255 bytes, none starting with `.`, without
control characters. So no key escapes its root (`..`, absolute), none is reserved, and every store can list it.
"""

from __future__ import annotations

import re

from persist_lib.errors import InvalidName, InvalidUsage

LONGEST_KEY = 1024
LONGEST_SEGMENT = 255
# A surrogate cannot be encoded; control characters do not survive the XML of an S3 listing.
SEGMENT = r"(?!\.)[^/\x00-\x1f\x7f\ud800-\udfff]+"
KEY = re.compile(rf"{SEGMENT}(?:/{SEGMENT})*")


def check_key(key: str) -> str:
    """Answer `key`, or raise InvalidName."""
    if isinstance(key, str) and KEY.fullmatch(key) and _is_short(key):
        return key
    raise InvalidName(
        f"a blob's key must be segments of 1 to {LONGEST_SEGMENT} bytes separated by '/', at most {LONGEST_KEY} bytes "
        f"in all, without control characters and none starting with '.': got {key!r}",
        key=key,
    )


def _is_short(key: str) -> bool:
    if len(key) <= LONGEST_SEGMENT // 4:
        return True
    return len(key.encode()) <= LONGEST_KEY and all(len(s.encode()) <= LONGEST_SEGMENT for s in key.split("/"))


def check_prefix(prefix: str) -> str:
    """Answer `prefix` if it is empty (everything) or a key followed by `/`, or raise InvalidName."""
    if prefix == "":
        return prefix
    if not isinstance(prefix, str) or not prefix.endswith("/"):
        raise InvalidName(
            f"a prefix to list must end in '/' (or be empty, for everything): got {prefix!r}", prefix=prefix
        )
    check_key(prefix[:-1])
    return prefix


def check_range(key: str, start: int, end: int) -> None:
    """Refuse a range that is no `[start, end)`."""
    check_key(key)
    if not 0 <= start <= end:
        raise InvalidUsage(f"blob {key}: a range must be 0 <= start <= end: got [{start}, {end})", start=start, end=end)
