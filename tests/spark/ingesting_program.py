"""A program that takes files into shards, wherever its environment says that Spark is, and says how each ingest ended.

Its input is a list of arguments for `jobs/ingest.py`. It is the same for every place, and starts Spark once.
"""

from __future__ import annotations

import json
import sys

from jobs.ingest import main
from jobs.session import build_session

if __name__ == "__main__":
    statuses = [main([*arguments, "--engine", "spark"]) for arguments in json.load(sys.stdin)]
    print("ANSWERS " + json.dumps(statuses), flush=True)
    build_session().stop()
