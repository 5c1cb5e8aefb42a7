"""Compactions on a small local Spark, here and by spark-submit, and what executors on other machines would be sent."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import jobs.compact
import persist_lib as persist
from jobs.session import SparkSettings, build_session, ship

folder = Path(sys.argv[1])
where = f"file:{folder}/data"


def write(client: persist.Client, shard: str) -> None:
    write, _ = client.open_shard(shard, persist.Schema(key={"id": "int64"}, value={"word": "string"}))
    for n in range(4):
        rows = [{"id": i, "word": f"w{i}"} for i in range(n * 1000, n * 1000 + 1000)]
        write.compare_and_append(rows, n, n + 1)


# spark-submit takes a file: this one is where the distribution is.
submit = [str(Path(sys.executable).with_name("spark-submit")), "--master", "local[1,4]", str(jobs.compact.__file__)]
with persist.open(where, config=persist.Config(inline_bytes=0)) as client:
    write(client, "a")
    session = build_session(SparkSettings(master="local[1,4]"))
    (outcome,) = jobs.compact.compact_shards(client, ["a"], lambda: session, engine="spark")
    assert outcome.error is None, outcome.error
    assert client.census("a").batches == 1
    name = ship(session)
    (shipped,) = Path(session.sparkContext._temp_dir).parent.rglob(name)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import jobs.tasks; print(sys.modules)"
    task = [sys.executable, "-c", code, str(shipped)]
    said = subprocess.run(task, capture_output=True, text=True, check=True, cwd=folder)
    assert f"{name}/jobs/tasks.py" in said.stdout
    assert f"{name}/persist_lib/__init__.py" in said.stdout
    session.stop()
    write(client, "b")
    subprocess.run([*submit, "--location", where, "--engine", "spark"], check=True, cwd=folder)
    assert client.census("b").batches == 1
assert importlib.util.find_spec("dagster") is None
