"""Names with a leading underscore are a package's own: other packages of the library do not reach for them."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

LIBRARY = Path(__file__).parents[3] / "persist_lib"
OF_OTHERS = {
    "_asdict",
    "_cython",
    "_exit",
    "_field_defaults",
    "_fields",
    "_get_binary_path",
    "_make",
    "_register_atexit",
    "_replace",
}
"""Names of Python itself, and of other libraries."""
OWN = re.compile(r"(?:\b(?:self|cls|super\(\))\.|\bdef |\bclass |^ *)(_[a-z]\w*)\b", re.MULTILINE)
REACHED = re.compile(r"(\b\w+|[)\]])\.(_[a-z]\w*)\b")


def test_no_package_reaches_for_what_is_private_to_another() -> None:
    texts = {path.relative_to(LIBRARY): path.read_text() for path in sorted(LIBRARY.rglob("*.py"))}
    own: dict[str, set[str]] = defaultdict(set)
    for path, text in texts.items():
        own[path.parts[0]].update(OWN.findall(text))
    assert [
        f"{path}: {of}.{name}"
        for path, text in texts.items()
        for of, name in REACHED.findall(text)
        if of not in {"self", "cls"} and name not in own[path.parts[0]] | OF_OTHERS
    ] == []
