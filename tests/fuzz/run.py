"""`make fuzz`: each target by coverage for some time, one after the other, and what they did.

    python -m tests.fuzz.run --seconds 60 [TARGET…]

It needs atheris, which `make fuzz` puts where only this process sees it. The code is instrumented once, which takes
longest, and each target is a fork of this process. Inputs that found new ground stay in build/fuzz/corpus/TARGET for
the next run; what broke the rule is in build/fuzz/found/TARGET-…, and is tried again by
`python -m tests.fuzz.run --again FILE`. Exit status 1 where one did.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

# Arrow's memory by the system's allocator, which gives back what is free: only so is a bound of memory one of use.
os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"

from tests.counted import count
from tests.fuzz.target import LONGEST, RSS_MB, SLOW_S, Target, check

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "fuzz"
INSTRUMENTED = ("persist_lib", "fastavro")
DONE = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
STEP = re.compile(r"^#(\d+)\s.*cov: (\d+)", re.MULTILINE)


def fuzz(target: Target, seconds: int, log: Path) -> int:
    """Fuzz one target in a child, which writes `log`: its exit status, 0 where nothing was found."""
    corpus = PLACE / "corpus" / target.name
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in target.seeds():
        (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    words = [
        "fuzz", f"-max_len={LONGEST}", f"-timeout={SLOW_S:.0f}", f"-rss_limit_mb={RSS_MB}", "-print_final_stats=1",
        f"-max_total_time={seconds}", f"-artifact_prefix={PLACE}/found/{target.name}-", str(corpus),
    ]  # fmt: skip
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    import atheris  # noqa: PLC0415 - only where it is fuzzed

    with log.open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)

    def one(data: bytes) -> None:
        try:
            check(target, data)
        except BaseException:
            (PLACE / "found" / f"{target.name}-{hashlib.sha256(data).hexdigest()[:16]}").write_bytes(data)
            raise

    atheris.Setup(words, one)
    atheris.Fuzz()
    os._exit(0)


def run(targets: list[Target], seconds: int) -> int:
    """Fuzz targets one after the other, and print a line for each. Returns how many inputs broke the rule."""
    found = PLACE / "found"
    found.mkdir(parents=True, exist_ok=True)
    executions: dict[str, int] = {}
    findings = 0
    for target in targets:
        began, before, log = time.monotonic(), set(found.glob(f"{target.name}-*")), PLACE / f"{target.name}.log"
        status = fuzz(target, seconds, log)
        said = log.read_text(errors="replace")
        steps = [(int(number), int(places)) for number, places in STEP.findall(said)]
        executions[target.name] = int(done[1]) if (done := DONE.search(said)) else max(steps, default=(0, 0))[0]
        new = sorted(set(found.glob(f"{target.name}-*")) - before)
        findings += status != 0
        print(
            f"{target.name:22} {executions[target.name]:>10,} inputs {max(steps, default=(0, 0))[1]:>6,} places "
            f"{time.monotonic() - began:5.0f} s{''.join(f'  FOUND {path}' for path in new)}"
            f"{f'  FAILED: see {log}' if status and not new else ''}",
            flush=True,
        )
    count("fuzzing", executions=executions, findings=findings)
    print(f"{sum(executions.values()):,} inputs to {len(executions)} decoders, {findings} broke the rule")
    return findings


def main(words: list[str]) -> int:
    """Fuzz the targets that are named, or all."""
    parser = argparse.ArgumentParser(prog="tests.fuzz.run")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--again", type=Path)
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args(words)
    if asked.again is not None:
        from tests.fuzz.table import TARGETS  # noqa: PLC0415 - without instruments here

        name = max((name for name in TARGETS if asked.again.name.startswith(f"{name}-")), key=len)
        print(f"{name}: {'a value' if check(TARGETS[name], asked.again.read_bytes()) else 'an error, as documented'}")
        return 0
    import atheris  # noqa: PLC0415 - only where it is fuzzed

    # It writes a line for each module.
    with redirect_stderr(StringIO()), atheris.instrument_imports(include=list(INSTRUMENTED)):
        from tests.fuzz.table import TARGETS  # noqa: PLC0415 - its imports are instrumented
    return 1 if run([TARGETS[name] for name in asked.names or TARGETS], asked.seconds) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
