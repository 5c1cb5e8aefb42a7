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
from jobs.compact import overtaken
from jobs.engine import EngineName, SparkEngine, adder_for, engine_for
from jobs.stop import Stop
from jobs.watch import Tells, silent
from orchestration.reads import Piece, ReadProbe
from orchestration.settings import IN_FLIGHT
from persist_lib.client import Client
from persist_lib.core.cost import storage_dollars
from persist_lib.core.duties import NAMES, figures_of
from persist_lib.core.plan.compaction import Plan
from persist_lib.core.plan.explain import explain
from persist_lib.core.plan.garbage import plan_garbage
from persist_lib.core.sums import Sums
from persist_lib.errors import Busy, Paused
from persist_lib.frontier import Antichain
from persist_lib.ids import SeqNo
from persist_lib.location.wrap.spending import Spending
from persist_lib.maintain import Census, Compacted
from persist_lib.maintain.duties import carry_out
from persist_lib.maintain.pauses import even_if_paused
from persist_lib.runtime.each import why

Duty = str
"""A name in the table of duties."""
Number = int | float

DUTIES: tuple[Duty, ...] = NAMES
"""All duties, in the order that frees the most."""


VERIFY_READS = 3
MAY_NOT = "this pipeline may not delete (PERSIST_MAY_DELETE, `may_delete`)"


class Finding(NamedTuple):
    """The verdict of one check on one shard. If `fatal`, a failed check fails the run.

    If not `is_evaluated`, there is no verdict: `says` is why.
    """

    check: str
    duty: Duty
    passed: bool
    numbers: Mapping[str, Number | str]
    says: str
    fatal: bool = False
    is_evaluated: bool = True


def not_evaluated(check: str, duty: Duty, why: str) -> Finding:
    """A check without a verdict, and why it has none."""
    return Finding(check, duty, False, {}, f"not evaluated: {why}", is_evaluated=False)


class Done(NamedTuple):
    """One duty, done: its figures, what the checks found, the shard's seqno after it, and lines for the report.

    `has_acted`: there was something to do, or something was found. `is_settled`: nothing is left for another pass.
    """

    duty: Duty
    numbers: Mapping[str, Number]
    findings: tuple[Finding, ...]
    seqno: SeqNo
    census: Census | None = None
    lines: tuple[str, ...] = ()
    has_acted: bool = True
    is_settled: bool = True
    withheld: str = ""
    """What it would have done and may not."""
    texts: Mapping[str, str] = {}
    """Times for people, where the shard's times are a clock, beside the integers in `numbers`."""


class ShardReport(NamedTuple):
    """One shard: the duties that were done, the errors of others, and those left: to another worker, or paused."""

    shard: str
    done: tuple[Done, ...]
    errors: Mapping[Duty, Exception]
    left: Mapping[Duty, str] = {}

    @property
    def problems(self) -> list[str]:
        """Why a run with this shard fails, one sentence each."""
        raised = [f"{duty}: {why(error)}" for duty, error in self.errors.items()]
        found = [finding for done in self.done for finding in done.findings if finding.fatal and not finding.passed]
        return raised + [f"{finding.duty}: {finding.says}" for finding in found]


@dataclass(frozen=True)
class Options:
    """How duties are done. `dry_run` changes nothing and says what would be done."""

    engine: EngineName = "auto"
    spark: SparkEngine | None = None
    dry_run: bool = False
    verify_reads: int | None = None
    """The number of times at which the contents before and after a compaction are compared. None: as a rule says of
    the shard, else 3."""
    scrub_all: bool = False
    """Whether a scrub reads all batches again, also those that an earlier one found sound."""
    may_delete: bool = True
    """Whether objects may be deleted and logs cut. If not, what would go is counted."""
    even_if_paused: bool = False
    """Whether duties also begin where they are paused."""
    in_flight: int = IN_FLIGHT
    """Shards worked on at once."""
    stop: Stop = field(default_factory=Stop)
    """Once it is set, no further duty begins."""
    tells: Tells = silent
    """Called as the tasks of a compaction or a scrub are done."""


def look_after(client: Client, shard: str, duties: Sequence[Duty], options: Options) -> ShardReport:
    """Do the duties of one shard, in order. Errors of a duty are in the report; they are not raised."""
    done: list[Done] = []
    errors: dict[Duty, Exception] = {}
    left: dict[Duty, str] = {}
    for duty in (duty for duty in DUTIES if duty in duties):
        if options.stop.is_set:
            break
        started = time.monotonic()
        try:
            with Spending() as spent, even_if_paused(options.even_if_paused):
                one = CALLS[duty](client, shard, options) if duty in CALLS else _plain(client, shard, duty, options)
            lines = (*one.lines, *_why(client, shard, duty))
        except (Busy, Paused) as others:
            left[duty] = str(others)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one shard must not stop the others
            errors[duty] = error
        else:
            seconds = round(time.monotonic() - started, 4)
            figures = {**one.numbers, **program.spent(spent.cost), "seqno": one.seqno, "seconds": seconds}
            done.append(one._replace(numbers=figures, lines=lines))
            if one.withheld:
                left[duty] = one.withheld
    return ShardReport(shard, tuple(done), errors, left)


def _why(client: Client, shard: str, duty: Duty) -> list[str]:
    """What is left for a duty, and why: what `persist shard show --why` says of the version that is known now."""
    version, now = client.machine(shard).version, client.consensus.now()
    found = explain(version, now, client.policy(name=shard), client.config.rollup_every, duty)
    return [f"after it: {one.says}" for one in found if one.about == duty]


def _plain(client: Client, shard: str, duty: Duty, options: Options) -> Done:
    """Do a duty of the table that has no function here, and report only its figures."""
    machine, policy = client.machine(shard), client.policy(name=shard)
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
        has_acted=bool(expired.overdue),
    )


def _retention(client: Client, shard: str, options: Options) -> Done:
    retained = client.retain(shard, dry_run=options.dry_run)
    figures = {
        **drawn("since_before", retained.before),
        **drawn("since_after", retained.after),
        **({} if retained.distance is None else {"distance": retained.distance}),
    }
    has_moved = retained.before != retained.after
    texts = _shown(client, shard, since_before=retained.before, since_after=retained.after)
    if texts and retained.distance is not None:
        texts["distance_time"] = retained.says
    return Done("retention", figures, (), _seqno(client, shard), has_acted=has_moved, texts=texts)


def _compacted(client: Client, shard: str, options: Options) -> Done:
    engine = engine_for(client, shard, options.engine, options.spark, options.tells)
    planned = client.compact(shard, dry_run=True)
    if options.dry_run or not planned.plan.requests:
        return _compaction_done(client, shard, planned, ())
    probe = _probe(client, shard, planned.plan, options)
    try:
        before = probe.measure() if probe else {}
        compacted = client.compact(shard, engine=engine, alone=True)
        findings = _compare(probe, before) if probe else ()
    finally:
        if probe:
            probe.close()
    return _compaction_done(client, shard, compacted, findings)


def _probe(client: Client, shard: str, plan: Plan, options: Options) -> ReadProbe | None:
    """What reads around this compaction; None if that is not wanted. It reads no more than the compaction does."""
    times = options.verify_reads
    if times is None:
        said = client.rules_of(shard).get("verify_reads")
        times = VERIFY_READS if said is None else said.value
    if times < 1:
        return None
    return ReadProbe(client, shard, times, budget_bytes=sum(one.size for one in plan.requests))


def _compare(probe: ReadProbe, before: Mapping[Piece, Sums]) -> tuple[Finding, ...]:
    """Judge what was read. All contents at the newest time, where they were read, are judged by what was appended."""
    after = probe.measure()
    differing = sorted({piece.as_of for piece in before if before[piece] != after[piece]})
    fingerprint = None if probe.newest is None else after[probe.newest].fingerprint
    is_kept = fingerprint in (None, probe.expected)
    if not is_kept:
        differing = sorted({*differing, probe.points[-1]})
    findings = [_identical(probe, len(after), differing)]
    if fingerprint is not None:
        says = f"contents add up to {fingerprint:016x}; all that was ever appended adds up to {probe.expected:016x}"
        figures = {"fingerprint": f"{fingerprint:016x}", "expected": f"{probe.expected:016x}"}
        findings.append(Finding("fingerprint_conserved", "compaction", is_kept, figures, says, fatal=True))
    return tuple(findings)


def _identical(probe: ReadProbe, read: int, differing: Sequence[int]) -> Finding:
    if not read:
        budget = (
            f"{probe.budget_bytes:,} bytes, which is what the compaction reads" if probe.budget_bytes else "nothing"
        )
        return not_evaluated("reads_identical", "compaction", f"no sample fits into {budget}")
    points = list(probe.points)
    named = [probe.show(point) for point in differing or points]
    verdict = f"snapshots as of [{', '.join(named)}] {'differ' if differing else 'are what they were'}"
    figures: dict[str, Number | str] = {
        "snapshots": len(points), "differing": len(differing), "share": round(probe.share, 4), "seed": probe.seed,
        "bytes_read": probe.cost.bytes_read, "dollars": probe.cost.dollars,
    }  # fmt: skip
    says = f"{verdict}; {probe.says()}"
    return Finding("reads_identical", "compaction", not differing, figures, says, fatal=True)


def _compaction_done(client: Client, shard: str, compacted: Compacted, findings: tuple[Finding, ...]) -> Done:
    census = client.census(shard)
    figures = compaction_numbers(compacted)
    figures |= amplification(census)
    figures["debt_after"] = census.debt
    lines = [f"{request.reason}: {len(request.inputs)} batches, {request.count} updates, {request.size} bytes"
             for request in compacted.plan.requests]  # fmt: skip
    lines += [f"left alone: {len(skipped.ids)} batches, as {skipped.why}" for skipped in compacted.plan.skipped]
    lines += overtaken(compacted)
    has_acted = bool(compacted.plan.requests)
    return Done("compaction", figures, findings, census.seqno, census, tuple(lines), has_acted=has_acted)


def amplification(census: Census) -> dict[str, float]:
    """Bytes that compaction wrote over bytes that were appended, since ever. Nothing before the first append."""
    found = census.write_amplification
    return {} if found is None else {"write_amplification": round(found, 4)}


def _rollups(client: Client, shard: str, options: Options) -> Done:
    rolled = client.roll_up(shard, dry_run=options.dry_run, alone=True)
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
    return Done("rollups", figures, (recent,), census.seqno, has_acted=rolled.key is not None or not recent.passed)


def _collected(client: Client, shard: str, options: Options) -> Done:
    collected = client.collect(shard, dry_run=options.dry_run or not options.may_delete)
    withheld = _withheld(options, "objects", len(collected.keys), collected.size)
    version = client.inspect(shard)
    left = plan_garbage(version.state, version.seqno)
    says = f"{len(left.keys)} objects that no reader can reach are still there" if left.keys else "nothing is overdue"
    says = withheld or says
    found = {"overdue": len(left.keys), "overdue_bytes": left.size}
    held = {"held": sum(held.keys for held in left.held), "held_bytes": sum(held.size for held in left.held)}
    would = "would_be_" if withheld else ""
    figures = {
        f"{would}deleted": len(collected.keys), f"{would}deleted_bytes": collected.size, "log_rows": collected.rows,
        "failed": len(collected.failed), **held,
        "dollars_month_saved": 0.0 if withheld else storage_dollars(collected.size, client.prices),
    }  # fmt: skip
    lines = [f"held: {held.keys} objects, {held.size} bytes: {held.why}" for held in left.held]
    lines += [f"could not delete {key}: {why}" for key, why in collected.failed.items()]
    finding = Finding("no_overdue_garbage", "garbage", not left.keys, found, says)
    has_acted = bool(collected.keys or collected.rows or collected.failed or left.keys)
    return Done(
        "garbage", figures, (finding,), version.seqno, None, tuple(lines), has_acted,
        is_settled=not (collected.failed or withheld), withheld=withheld,
    )  # fmt: skip


def _withheld(options: Options, what: str, count: int, size: int) -> str:
    """What of a duty that deletes is not done, as that is not allowed; empty if it is, or there is nothing."""
    if options.may_delete or options.dry_run or not count:
        return ""
    return f"{count:,} {what}, {size:,} bytes, would go, and {MAY_NOT}"


def _audited(client: Client, shard: str, options: Options) -> Done:
    is_dry = options.dry_run or not options.may_delete
    audited = client.audit_orphans(shard, dry_run=is_dry)
    withheld = _withheld(options, "orphans", len(audited.orphans) + audited.uploads, audited.size)
    deleted = not is_dry and audited.orphans
    left = client.audit_orphans(shard, dry_run=True) if deleted else audited
    says = f"{len(left.orphans)} orphans, {left.size} bytes" if left.orphans else "no orphans"
    says = withheld or says
    if audited.failed:
        says = f"{len(audited.failed)} objects could not be deleted"
    is_clean = not (left.orphans or audited.failed)
    finding = Finding("no_orphan", "orphans", is_clean, {"orphans": len(left.orphans)}, says)
    figures = {
        "orphans": len(audited.orphans), "orphan_bytes": audited.size, "referred": audited.live,
        "pending": audited.pending, "swept": len(audited.swept), "failed": len(audited.failed),
        "unfinished_uploads": audited.uploads, "unfinished_upload_bytes": audited.uploads_size,
    }  # fmt: skip
    lines = [f"orphan: {key}" for key in audited.orphans[:100]]
    lines += [f"could not delete {key}: {reason}" for key, reason in audited.failed.items()]
    has_acted = bool(audited.orphans or audited.failed or audited.uploads or left.orphans)
    seqno = _seqno(client, shard)
    return Done(
        "orphans", figures, (finding,), seqno, None, tuple(lines), has_acted, is_clean and not withheld, withheld
    )


def _scrubbed(client: Client, shard: str, options: Options) -> Done:
    adder = adder_for(client, shard, options.engine, options.spark, options.tells)
    verified = client.verify(shard, full=options.scrub_all, engine=adder)
    scrubbed, damage = verified.scrubbed, [one.says for one in verified.findings if one.is_damage]
    figures = {
        "rows": verified.rows, "rollups": verified.rollups, "objects": verified.objects, "damaged": len(damage),
        "orphans": verified.orphans, "orphan_bytes": verified.orphan_bytes,
    }  # fmt: skip
    if scrubbed is not None:
        figures |= {
            "batches": scrubbed.batches, "updates": scrubbed.updates, "bytes": scrubbed.size, "left": scrubbed.left,
            "known": len(scrubbed.known), "mended": len(scrubbed.mended),
        }  # fmt: skip
    batches = scrubbed.says if scrubbed is not None else "no batch could be read"
    says = "; ".join([*damage, batches]) if damage else batches
    finding = Finding("parts_undamaged", "scrub", not damage, {"damaged": len(damage)}, says, fatal=True)
    has_acted = bool(damage or (scrubbed and (scrubbed.batches or scrubbed.mended or scrubbed.gone)))
    lines = (verified.says, says, *(f"not checked: {why}" for why in verified.not_checked))
    seqno = _seqno(client, shard)
    return Done("scrub", figures, (finding,), seqno, None, lines, has_acted, is_settled=not damage)


def _census(client: Client, shard: str, _options: Options) -> Done:
    census = client.census(shard)
    says = f"{census.batches} batches for {census.updates} updates; the bound is {census.batch_bound}"
    found = {"batches": census.batches, "bound": census.batch_bound}
    finding = Finding("batch_count_within_bound", "census", census.batches <= census.batch_bound, found, says)
    texts = _shown(client, shard, since=census.since, upper=census.upper)
    texts |= {f"rule_{name}": f"{one.shown} ({one.pattern})" for name, one in client.rules_of(shard).items()}
    return Done("census", census_numbers(census), (finding,), census.seqno, census, (says,), texts=texts)


def census_numbers(census: Census) -> dict[str, Number]:
    """The census in figures that can be drawn over time."""
    names = (
        "batches", "batch_bound", "empty_batches", "parts", "runs", "updates", "size", "inline_size", "debt",
        "debt_requests", "garbage", "garbage_size", "collectable", "collectable_size", "writers", "readers", "overdue",
        "holds", "retired", "rollups", "rollup_lag", "seqno_held", "dollars_month",
    )  # fmt: skip
    figures: dict[str, Number] = {name: getattr(census, name) for name in names}
    return {**figures, **amplification(census), **drawn("since", census.since), **drawn("upper", census.upper)}


def drawn(name: str, frontier: Antichain) -> dict[str, int]:
    """A frontier as a figure. The empty frontier and times from 2**63 on are left out, as a plot cannot show them."""
    return {name: frontier.time} if frontier.time is not None and frontier.time < 2**63 else {}


def _shown(client: Client, shard: str, **frontiers: Antichain) -> dict[str, str]:
    """Frontiers for people, where times are a clock. The names say that they are times: `since_time`."""
    times = client.machine(shard).times()
    if times.unit is None:
        return {}
    return {f"{name}_time": times.show(frontier.time) for name, frontier in frontiers.items()}


def _seqno(client: Client, shard: str) -> SeqNo:
    return client.machine(shard).version.seqno


CALLS: Mapping[Duty, Callable[[Client, str, Options], Done]] = {
    "leases": _leases, "retention": _retention, "compaction": _compacted, "rollups": _rollups,
    "garbage": _collected, "orphans": _audited, "scrub": _scrubbed, "census": _census,
}  # fmt: skip
