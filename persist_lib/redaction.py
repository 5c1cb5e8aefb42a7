"""Keeping passwords out of what people read: messages, logs, representations, the arguments of processes."""

from __future__ import annotations

import re

# Greedy up to the last `@`, as a password may hold one, or a slash or a space, where it is not encoded as it should be.
# After a host that no `@` follows, digits are a port.
USERINFO = re.compile(r"(://[^\s:/@'\"]*):(?!\d+(?:[/?,'\"\s]|$)).*@", re.DOTALL)
OPTION = re.compile(r"((?:password|passphrase|secret|token)\w*=)[^&\s'\"]+", re.IGNORECASE)
HIDDEN = "***"


def redacted(text: str) -> str:
    """A URL, or a text with URLs in it, without passwords. Rather too little of it is left than too much."""
    if "://" in text:
        text = USERINFO.sub(rf"\1:{HIDDEN}@", text)
    return OPTION.sub(rf"\1{HIDDEN}", text) if "=" in text else text
