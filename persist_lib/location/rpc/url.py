"""The URLs of shard servers: addresses, the paths of files, and the URL of the store behind them.

No secret is ever part of one, but what the URL of that store holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import parse_qsl, quote

from persist_lib.arguments import shown
from persist_lib.errors import InvalidUsage

OPTIONS = ("credentials", "ca", "cert", "key")
"""What a URL may say besides. Each is the path of a file."""
STORE = "store"
"""The option that is the URL of the consensus behind the servers."""
ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")


def parts(url: str) -> tuple[list[str], dict[str, str]]:
    """The addresses of a URL, and the paths of its options."""
    before, _, query = url.partition("://")[2].partition("?")
    if "@" in before or _secrets(query):  # not quoted: it may be a secret
        raise InvalidUsage(
            "a token never goes into the URL of a shard server, where logs and process lists show it. Set "
            "PERSIST_TOKEN, or name a file that holds it, as in persist://host:7600?credentials=/path"
        )
    return _addresses(url, before.split(",")), _files(url, query)


def _secrets(query: str) -> list[str]:
    return [name for name, _ in parse_qsl(query, keep_blank_values=True) if name in ("token", "password", "secret")]


def _files(url: str, query: str) -> dict[str, str]:
    options = parse_qsl(query, keep_blank_values=True)
    if len(dict(options)) < len(options) or not all(name in (*OPTIONS, STORE) and path for name, path in options):
        raise InvalidUsage(
            f"the options of shard servers are {', '.join(OPTIONS)}, each once and with the path of a file, and "
            f"{STORE}, with a quoted URL: got {shown(url)}",
            url=url,
        )
    return dict(options)


def _addresses(url: str, found: list[str]) -> list[str]:
    if not all(match and int(match[2]) < 65536 for match in map(ADDRESS.fullmatch, found)):
        raise InvalidUsage(
            f"shard servers are named by host and port, as in 'persist://localhost:7600,other:7600': got {shown(url)}",
            url=url,
        )
    return found


def joined(url: str, addresses: Sequence[str], options: Mapping[str, str]) -> str:
    """The URL with the scheme of another one, and with these addresses and options."""
    told = "&".join(f"{name}={quote(value, '' if name == STORE else '/')}" for name, value in options.items())
    return f"{url.partition(':')[0]}://{','.join(addresses)}{f'?{told}' if told else ''}"
