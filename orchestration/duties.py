"""What a run does with one shard: each duty is one call of the library, counted and checked. It does not use Dagster.

If a duty fails, the later ones are still tried: a shard with a damaged part still gets its garbage collected. Every
duty is idempotent, so doing it again after a crash costs little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jobs import program
from jobs.compact import numbers as compaction_numbers
from jobs.engine import EngineName, SparkEngine, adder_for, engine_for
from orchestration.reads import ReadProbe
from persist_lib.client import Client
from persist_lib.core.cost import storage_dollars
from persist_lib.core.duties import NAMES, figures_of
from persist_lib.core.plan.garbage import plan_garbage
from persist_lib.frontier import Antichain
from persist_lib.ids import SeqNo
from persist_lib.location.wrap.spending import Spending
from persist_lib.maintain import Census, Compacted
from persist_lib.maintain.duties import carry_out

Duty = str
"""A name in the table of duties."""
Number = int | float

DUTIES: tuple[Duty, ...] = NAMES
"""All duties, in the order that frees the most."""


class Finding(NamedTuple):
    """The verdict of one check on one shard. If `fatal`, a failed check fails the run."""

    check: str
    duty: Duty
    passed: bool
    numbers: Mapping[str, Number | str]
    says: str
    fatal: bool = False


class Done(NamedTuple):
    """One duty, done: its figures, what the checks found, the shard's seqno after it, and lines for the report."""

    duty: Duty
    numbers: Mapping[str, Number]
    findings: tuple[Finding, ...]
    seqno: SeqNo
    census: Census | None = None
    lines: tuple[str, ...] = ()


class ShardReport(NamedTuple):
    """One shard: the duties that were done, and the errors of those that were not."""

    shard: str
    done: tuple[Done, ...]
    errors: Mapping[Duty, Exception]

    @property
    def problems(self) -> list[str]:
        """Why a run with this shard fails, one sentence each."""
        raised = [f"{duty}: {type(error).__name__}: {error}" for duty, error in self.errors.items()]
        found = [finding for done in self.done for finding in done.findings if finding.fatal and not finding.passed]
        return raised + [f"{finding.duty}: {finding.says}" for finding in found]


@dataclass(frozen=True)
class Options:
    """How duties are done. `dry_run` changes nothing and says what would be done."""

    engine: EngineName = "auto"
    spark: SparkEngine | None = None
    dry_run: bool = False
    verify_reads: int = 3
    """The number of times at which the contents before and after a compaction are compared."""
    verify_below_bytes: int = 1 << 30
    """Shards larger than this are not read for the comparison; the state machine's own check has to be enough."""
    scrub_after: Callable[[str], int] = field(default=lambda _shard: 0)
    """Returns the seqno up to which the last scrub of a shard read."""


def look_after(client: Client, shard: str, duties: Sequence[Duty], options: Options) -> ShardReport:
    """Do the duties of one shard, in order. Errors of a duty are in the report; they are not raised."""
    done: list[Done] = []
    errors: dict[Duty, Exception] = {}
    for duty in (duty for duty in DUTIES if duty in duties):
        started = time.monotonic()
        try:
            with Spending() as spent:
                one = CALLS[duty](client, shard, options) if duty in CALLS else _plain(client, shard, duty, options)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one shard must not stop the others
            errors[duty] = error
        else:
            seconds = round(time.monotonic() - started, 4)
            figures = {**one.numbers, **program.spent(spent.cost), "seqno": one.seqno, "seconds": seconds}
            done.append(one._replace(numbers=figures))
    return ShardReport(shard, tuple(done), errors)


def _plain(client: Client, shard: str, duty: Duty, options: Options) -> Done:
    """Do a duty of the table that has no function here, and report only its figures."""
    machine, policy = client.machine(shard), client.policy()
    answer = carry_out(duty, machine, client.leases, policy=policy, dry_run=options.dry_run)
    return Done(duty, figures_of(answer), (), machine.fetch().seqno)


def _leases(client: Client, shard: str, options: Options) -> Done:
    expired = client.expire(shard, dry_run=options.dry_run)
    lines = [f"retired {overdue}" for overdue in expired.overdue]
    return Done(
        "leases",
        {"expired": len(expired.overdue), "live": expired.live - len(expired.overdue)},
        (),
        _seqno(client, shard),
        None,
        tuple(lines),
    )


def _retention(client: Client, shard: str, options: Options) -> Done:
    retained = client.retain(shard, dry_run=options.dry_run)
    figures = {
        **_time("since_before", retained.before),
        **_time("since_after", retained.after),
        **({} if retained.distance is None else {"distance": retained.distance}),
    }
    return Done("retention", figures, (), _seqno(client, shard))


def _compacted(client: Client, shard: str, options: Options) -> Done:
    engine = engine_for(client, shard, options.engine, options.spark)
    planned = client.compact(shard, dry_run=True)
    if options.dry_run or not planned.plan.requests:
        return _compaction_done(client, shard, planned, ())
    probe = _probe(client, shard, options)
    try:
        before = probe.measure() if probe else {}
        compacted = client.compact(shard, engine=engine)
        findings = _compare(probe, before) if probe else ()
    finally:
        if probe:
            probe.close()
    return _compaction_done(client, shard, compacted, findings)


def _probe(client: Client, shard: str, options: Options) -> ReadProbe | None:
    if options.verify_reads < 1 or client.inspect(shard).state.size > options.verify_below_bytes:
        return None
    return ReadProbe(client, shard, options.verify_reads)


def _compare(probe: ReadProbe, before: Mapping[int, object]) -> tuple[Finding, ...]:
    after = probe.measure()
    differing = [as_of for as_of in before if before[as_of] != after[as_of]]
    says = (
        f"snapshots as of {differing} differ" if differing else f"snapshots as of {sorted(before)} are what they were"
    )
    reads = {"snapshots": len(before), "differing": len(differing)}
    findings = [Finding("reads_identical", "compaction", not differing, reads, says, fatal=True)]
    if probe.points:
        newest = after[probe.points[-1]].fingerprint
        kept = newest == probe.expected
        says = f"contents add up to {newest:016x}; all that was ever appended adds up to {probe.expected:016x}"
        figures = {"fingerprint": f"{newest:016x}", "expected": f"{probe.expected:016x}"}
        findings.append(Finding("fingerprint_conserved", "compaction", kept, figures, says, fatal=True))
    return tuple(findings)


def _compaction_done(client: Client, shard: str, compacted: Compacted, findings: tuple[Finding, ...]) -> Done:
    census = client.census(shard)
    figures = compaction_numbers(compacted)
    figures["write_amplification"] = round(compacted.bytes_out / max(1, census.size), 4)
    figures["debt_after"] = census.debt
    lines = [f"{request.reason}: {len(request.inputs)} batches, {request.count} updates, {request.size} bytes"
             for request in compacted.plan.requests]  # fmt: skip
    lines += [f"left alone: {len(skipped.ids)} batches, as {skipped.why}" for skipped in compacted.plan.skipped]
    return Done("compaction", figures, findings, census.seqno, census, tuple(lines))


def _rollups(client: Client, shard: str, options: Options) -> Done:
    rolled = client.roll_up(shard, dry_run=options.dry_run)
    census, most = client.census(shard), 2 * client.config.rollup_every
    says = f"the newest rollup is {census.rollup_lag} transitions old, of at most {most}"
    recent = Finding(
        "rollup_recent", "rollups", census.rollup_lag <= most, {"lag": census.rollup_lag, "most": most}, says
    )
    figures = {
        "written": int(rolled.key is not None),
        "bytes": rolled.size,
        "behind": rolled.behind,
        "rollups": census.rollups,
    }
    return Done("rollups", figures, (recent,), census.seqno)


def _collected(client: Client, shard: str, options: Options) -> Done:
    collected = client.collect(shard, dry_run=options.dry_run)
    version = client.inspect(shard)
    left = plan_garbage(version.state, version.seqno)
    says = f"{len(left.keys)} objects that no reader can reach are still there" if left.keys else "nothing is overdue"
    found = {"overdue": len(left.keys), "overdue_bytes": left.size}
    held = {"held": sum(held.keys for held in left.held), "held_bytes": sum(held.size for held in left.held)}
    figures = {
        "deleted": len(collected.keys), "deleted_bytes": collected.size, "log_rows": collected.rows,
        "failed": len(collected.failed), **held,
        "dollars_month_saved": storage_dollars(collected.size, client.prices),
    }  # fmt: skip
    lines = [f"held: {held.keys} objects, {held.size} bytes: {held.why}" for held in left.held]
    lines += [f"could not delete {key}: {why}" for key, why in collected.failed.items()]
    finding = Finding("no_overdue_garbage", "garbage", not left.keys, found, says)
    return Done("garbage", figures, (finding,), version.seqno, None, tuple(lines))


def _audited(client: Client, shard: str, options: Options) -> Done:
    audited = client.audit_orphans(shard, dry_run=options.dry_run)
    deleted = not options.dry_run and audited.orphans
    left = client.audit_orphans(shard, dry_run=True) if deleted else audited
    says = f"{len(left.orphans)} orphans, {left.size} bytes" if left.orphans else "no orphans"
    finding = Finding("no_orphan", "orphans", not left.orphans, {"orphans": len(left.orphans)}, says)
    figures = {
        "orphans": len(audited.orphans), "orphan_bytes": audited.size, "referred": audited.live,
        "pending": audited.pending, "swept": len(audited.swept), "failed": len(audited.failed),
        "unfinished_uploads": audited.uploads, "unfinished_upload_bytes": audited.uploads_size,
    }  # fmt: skip
    lines = [f"orphan: {key}" for key in audited.orphans[:100]]
    return Done("orphans", figures, (finding,), _seqno(client, shard), None, tuple(lines))


def _scrubbed(client: Client, shard: str, options: Options) -> Done:
    adder = adder_for(client, shard, options.engine, options.spark)
    scrubbed = client.scrub(shard, after=options.scrub_after(shard), engine=adder)
    says = "; ".join(f"batch {id_}: {what}" for id_, what in scrubbed.damaged) or "every digest and every sum is right"
    figures = {
        "batches": scrubbed.batches, "updates": scrubbed.updates, "bytes": scrubbed.size,
        "damaged": len(scrubbed.damaged), "scrubbed_to": scrubbed.newest,
    }  # fmt: skip
    finding = Finding(
        "parts_undamaged", "scrub", not scrubbed.damaged, {"damaged": len(scrubbed.damaged)}, says, fatal=True
    )
    return Done("scrub", figures, (finding,), _seqno(client, shard), None, (says,))


def _census(client: Client, shard: str, _options: Options) -> Done:
    census = client.census(shard)
    says = f"{census.batches} batches for {census.updates} updates; the bound is {census.batch_bound}"
    found = {"batches": census.batches, "bound": census.batch_bound}
    finding = Finding("batch_count_within_bound", "census", census.batches <= census.batch_bound, found, says)
    return Done("census", census_numbers(census), (finding,), census.seqno, census, (says,))


def census_numbers(census: Census) -> dict[str, Number]:
    """The census in figures that can be drawn over time."""
    names = (
        "batches", "batch_bound", "empty_batches", "parts", "runs", "updates", "size", "inline_size", "debt",
        "debt_requests", "garbage", "garbage_size", "collectable", "collectable_size", "writers", "readers", "overdue",
        "holds", "retired", "rollups", "rollup_lag", "seqno_held", "dollars_month",
    )  # fmt: skip
    figures: dict[str, Number] = {name: getattr(census, name) for name in names}
    return {**figures, **_time("since", census.since), **_time("upper", census.upper)}


def _time(name: str, frontier: Antichain) -> dict[str, int]:
    """A frontier as a figure. The empty frontier and times from 2**63 on are left out, as a plot cannot show them."""
    return {name: frontier.time} if frontier.time is not None and frontier.time < 2**63 else {}


def _seqno(client: Client, shard: str) -> SeqNo:
    return client.machine(shard).version.seqno


CALLS: Mapping[Duty, Callable[[Client, str, Options], Done]] = {
    "leases": _leases, "retention": _retention, "compaction": _compacted, "rollups": _rollups,
    "garbage": _collected, "orphans": _audited, "scrub": _scrubbed, "census": _census,
}  # fmt: skip
