"""A Consensus whose operations a shard server carries out, and which takes commands instead of rows.

    persist://host:7600                     one server
    persist://host:7600,other:7600          several: whichever is there
    persist://host:7600?credentials=/path   the token is in that file; else it is taken from $PERSIST_TOKEN, if at all
    persists://host:7600                    over TLS; ?ca=/path are its authorities, else those that gRPC comes with
    persists://…?cert=/path&key=/path       with a certificate of the client's own, where the server asks for one

It needs no credentials of the store. Blobs are read and written without the server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote

from persist_lib.arguments import shown
from persist_lib.core.plan.debts import Debts
from persist_lib.errors import Determinate, Indeterminate, InvalidUsage
from persist_lib.format import wire
from persist_lib.ids import SeqNo
from persist_lib.location.api import Change, Newest, Row
from persist_lib.location.commands import Answered, Proposed
from persist_lib.location.rpc.credentials import Credentials, check_secret
from persist_lib.location.rpc.servers import Servers
from persist_lib.location.rpc.subscriptions import Subscriptions
from persist_lib.location.rpc.tls import Tls
from persist_lib.location.scheme import Opening
from persist_lib.runtime.ambient import Runtime

OPTIONS = ("credentials", "ca", "cert", "key")
"""What a URL may say besides. Each is the path of a file."""
ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")


def canonical(url: str) -> str:
    """The URL, which means the same in any process. Raises InvalidUsage for addresses that are none."""
    addresses, files = _parts(url)
    # Not resolved: what a link leads to changes when secrets are replaced.
    options = "&".join(f"{name}={quote(str(Path(path).absolute()))}" for name, path in files.items())
    return f"{url.partition(':')[0]}://{','.join(addresses)}{f'?{options}' if options else ''}"


def open_consensus(url: str, opening: Opening) -> RpcConsensus:
    """Open the Consensus of the servers at `url`. Raises Determinate if none of them answers."""
    addresses, files = _parts(url)
    credentials = Credentials(files.get("credentials"))
    if not url.startswith("persists:"):
        check_secret(addresses, credentials)
    return RpcConsensus(Servers(addresses, opening.runtime, credentials, _tls(url, files)), opening.runtime)


def _tls(url: str, files: Mapping[str, str]) -> Tls | None:
    given = [name for name in ("ca", "cert", "key") if name in files]
    if url.startswith("persists:"):
        return Tls(files)
    if given:
        raise InvalidUsage(f"the options {', '.join(given)} are for TLS: write persists:// for it, as in "
                           f"persists://host:7600?ca=/path. Got {shown(url)}", url=url)  # fmt: skip
    return None


def _parts(url: str) -> tuple[list[str], dict[str, str]]:
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
    if len(dict(options)) < len(options) or not all(name in OPTIONS and path for name, path in options):
        raise InvalidUsage(
            f"the options of shard servers are {', '.join(OPTIONS)}, each once and with the path of a file: "
            f"got {shown(url)}",
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


class RpcConsensus:
    """Consensus by way of shard servers. A read is linearizable where that of any Consensus is: they scan the store."""

    def __init__(self, servers: Servers, runtime: Runtime | None = None) -> None:
        self._servers = servers
        self._call("now", None, type(None))
        self._subscriptions = Subscriptions(servers, runtime or Runtime())

    def head(self, key: str) -> Row | None:
        return self._call("head", key, Row | None, route=key)

    def scan(self, key: str, from_seqno: SeqNo, limit: int) -> list[Row]:
        rows: list[Row] = []
        began = self._subscriptions.scanning(key)
        while True:
            asked = (key, SeqNo(rows[-1].seqno + 1) if rows else from_seqno, limit - len(rows))
            page, is_last = self._call("scan", asked, tuple[list[Row], bool], route=key)
            rows += page
            if is_last or len(rows) >= limit:
                break
        if len(rows) < limit:
            self._subscriptions.scanned(key, began, rows[-1].seqno if rows else SeqNo(0))
        return rows

    def compare_and_set(self, key: str, expected: Newest | None, data: bytes) -> bool:
        return self._call("compare_and_set", (key, expected, data), bool, route=key, reads=False)

    def compare_and_set_many(self, changes: Mapping[str, Change]) -> bool:
        return self._call(
            "compare_and_set_many", dict(changes), bool, route=min(changes, default=""), reads=not changes
        )

    def commit_commands(
        self, proposed: Sequence[Proposed], token: bytes, timeout_s: float, *, is_repeated: bool
    ) -> list[Answered]:
        commands = tuple((one.shard, one.known, *wire.encode_command(one.command)) for one in proposed)
        asked = wire.Commit(token, is_repeated, commands)
        route = min(one.shard for one in proposed)
        try:
            found = self._call("commit", asked, list[wire.Answer], route=route, reads=False, seconds=timeout_s)
        except (Determinate, InvalidUsage) as error:
            if not is_repeated:
                raise
            # SUBTLE: this time it was not even sent, or refused at the door. But it was sent before, and a server may
            # have committed it then, or do so yet.
            raise Indeterminate(
                f"{error.message}. But the command was sent before, so it is not known whether it was or will be "
                f"committed. Repeat it with the same token {token.hex()}",
                token=token,
            ) from error
        return [
            Answered(
                one.seqno, one.refusal and wire.decode_refusal(*one.refusal), one.is_committed,
                tuple(Row(*row) for row in one.rows), one.outcome, one.is_due,
            )
            for one in found
        ]  # fmt: skip

    def truncate(self, key: str, seqno: SeqNo) -> int:
        return self._call("truncate", (key, seqno), int, route=key, reads=False)

    def rewind(self, key: str, seqno: SeqNo, newest: Newest) -> int:
        return self._call("rewind", (key, seqno, newest), int, route=key, reads=False)

    def list_keys(self) -> Iterator[str]:
        return iter(self._call("list_keys", None, list[str]))

    def heads(self) -> dict[str, SeqNo]:
        return self._call("heads", None, dict[str, SeqNo])

    @property
    def answers_debts(self) -> bool:
        return True

    def debts(self, settings: str, done: Mapping[str, Sequence[str]], most: int | None, seconds: float) -> Debts | None:
        asked = (settings, {duty: list(names) for duty, names in done.items()}, most, seconds)
        found: Debts | None = self._call("debts", asked, Debts | None)
        return found

    def now(self) -> int:
        return self._servers.now()

    def wait(self, key: str, seqno: SeqNo, longest_s: float) -> bool:
        return self._subscriptions.wait(key, seqno, longest_s)

    def pushed(self, key: str, after: SeqNo) -> Sequence[Row] | None:
        return self._subscriptions.pushed(key, after)

    def close(self) -> None:
        self._subscriptions.close()
        self._servers.close()

    def _call(
        self, name: str, arguments: object, kind: object, *, route: str = "", reads: bool = True,
        seconds: float | None = None,
    ) -> Any:  # fmt: skip
        return self._servers.call(name, arguments, kind, route=route, seconds=seconds, reads=reads)
