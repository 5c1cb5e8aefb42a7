"""`persist serve` with tokens and TLS, as a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import persist_lib as persist
from persist_lib.errors import NotAuthenticated
from tests.unit.server.certificates import Authority
from tests.worlds import SCHEMA, row

TOKEN = "a-token-0123456789abcdef"


def test_serve_with_tokens_and_tls_listens_on_every_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, cert, key, tokens = f"file:{tmp_path}/location", tmp_path / "c.pem", tmp_path / "k.pem", tmp_path / "t.toml"
    persist.open(url).close()
    authority = Authority(tmp_path / "ca", "ca")
    authority.issue(cert, key)
    tokens.write_text(f'[clients.a]\ntoken = "{TOKEN}"\nrights = {{ "*" = ["append"] }}')
    command = [sys.executable, "-m", "persist_lib.cli", "--location", url, "--json", "serve", "--listen", "0.0.0.0:0"]
    refused = subprocess.run(
        [*command, "--token-file", tokens], capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == 2, refused
    assert "without both tokens and TLS" in refused.stderr
    command += ["--token-file", str(tokens), "--tls-cert", str(cert), "--tls-key", str(key), "--drain", "0.1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    ) as served:
        try:
            assert served.stdout is not None
            port = json.loads(served.stdout.readline())["listening"].rpartition(":")[2]
            at = f"persists://127.0.0.1:{port}?ca={authority.ca}"
            with pytest.raises(NotAuthenticated):
                persist.open(url, at)
            monkeypatch.setenv("PERSIST_TOKEN", TOKEN)
            with persist.open(url, at) as client:
                client.open_writer("s", SCHEMA).append_now([row(1)])
        finally:
            served.send_signal(signal.SIGTERM)
            out, err = served.communicate(timeout=30)
    assert served.returncode == 0, err
    assert TOKEN not in out + err
