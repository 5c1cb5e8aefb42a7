"""What a location and its shards look like, in one value each, as text, Markdown or HTML, with pictures.

    from persist_lib import report

    found = report.fleet(client)                     # all shards: debt, dollars, garbage, damage, duties overdue
    page = report.shard(client, "orders")            # one shard: its last thirty days, holders, duties
    page = report.look(client, "people")             # what has the name: a page, or the shards of a table
    other = report.simulate(client, "orders", {"a": {"compaction_weight": 1}})    # its appends under other policies
    Path("fleet.html").write_text(report.html(report.shown(found)))

To look changes nothing. Pictures need the package matplotlib: pip install 'persist-lib[pictures]'.
"""

from persist_lib.core.plan.simulate import Simulated
from persist_lib.report.document import MOST, Document, Table, html, markdown, shown
from persist_lib.report.fleet_report import Fleet, Row, fleet
from persist_lib.report.shard_page import Action, Day, ShardPage, look, shard
from persist_lib.report.simulated import Comparison, simulate

__all__ = [
    "MOST", "Action", "Comparison", "Day", "Document", "Fleet", "Row", "ShardPage", "Simulated", "Table", "fleet",
    "html", "look", "markdown", "shard", "shown", "simulate",
]  # fmt: skip
