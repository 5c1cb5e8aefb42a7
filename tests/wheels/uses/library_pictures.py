"""The report of a location as one HTML file, with its picture."""

import sys
from pathlib import Path

import persist_lib as persist
from persist_lib import report

schema = persist.Schema(key={"id": "int64 not null"}, value={"word": "string"})
with persist.open(f"file:{sys.argv[1]}/data") as client:
    client.table("words", schema).append([{"id": n, "word": "w"} for n in range(100)])
    page = Path(sys.argv[1]) / "fleet.html"
    page.write_text(report.html(report.shown(report.fleet(client), picture=True)))
    assert "data:image/png;base64," in page.read_text()
