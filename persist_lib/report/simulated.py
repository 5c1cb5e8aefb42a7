"""What other policies would have made of a shard: its appends, as its log tells them, once more under each of them.

What is not in the log is not made up: it is assumed, and each assumption is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from persist_lib.arguments import parse_number, shown
from persist_lib.client import Client
from persist_lib.core import units
from persist_lib.core.cost import Cost
from persist_lib.core.plan.compaction import Policy
from persist_lib.core.plan.simulate import BYTES_EACH, Appended, History, Simulated, replay
from persist_lib.core.rules import SHARES, parse_rules, ruled, told
from persist_lib.core.state import State
from persist_lib.errors import InvalidUsage
from persist_lib.ids import parse_shard_id
from persist_lib.location.wrap.spending import charged
from persist_lib.report.shard_page import COMMANDS, Log, fetch_log
from persist_lib.shard.log import apply_rows

AS_IT_IS = "as it is"
REPLAYED = frozenset({*SHARES, "retention"})
"""What of a rule changes what a replay finds."""
ENOUGH = 500
"""How many appends tell policies apart, where the log knows fewer as upkeep truncated it."""
EVERY = 10
"""After how many appends upkeep is taken to run where the log says nothing of it."""


class Comparison(msgspec.Struct, frozen=True):
    """A shard's history under several policies. `reads_a_day` reads of its newest contents are in the dollars.

    `assumed` says what the log does not know, in sentences. `appends` are known, over `span_ms`.
    """

    shard: str
    location: str
    appends: int
    span_ms: int
    reads_a_day: float
    assumed: tuple[str, ...]
    found: tuple[Simulated, ...]
    cost: Cost = Cost()
    """What it cost to look."""


@charged
def simulate(
    client: Client, name: str, policies: Mapping[str, object], *, reads_a_day: float = 0, reading: Log | None = None
) -> Comparison:  # fmt: skip
    """Replay a shard's appends under its own policy and under others, by their names. Changes nothing.

    A policy is a `persist.Policy`, or fields of a rule as a mapping or as TOML: `compaction_weight`,
    `compaction_advance`, `compaction_ahead`, `retention`. Costs as a shard's page. Raises InvalidUsage for a policy
    with a field that says nothing here, and for a shard that has no appends in its log; NotFound, and Damage where the
    state cannot be read.
    """
    reads_a_day = parse_number(reads_a_day, "reads_a_day")
    id_, own = parse_shard_id(name), client.policy(name=name)
    asked = {AS_IT_IS: msgspec.structs.replace(own, retention=None)}
    asked |= {label: policy_of_rule(own, given, label) for label, given in policies.items()}
    log = fetch_log(client, id_, client.inspect(name)) if reading is None else reading
    history = history_of(name, log)
    found = tuple(replay(history, label, policy, client.prices, reads_a_day) for label, policy in asked.items())
    known = len(history.appends) - history.there
    return Comparison(name, client.url, known, history.span_ms, reads_a_day, history.assumed, found)


def policy_of_rule(own: Policy, given: object, label: str) -> Policy:
    """A policy itself, or `own` with the fields of a rule, given as a mapping or as TOML. Raises InvalidUsage."""
    if isinstance(given, Policy):
        return given
    if isinstance(given, str):
        rules = parse_rules(f"[[rule]]\npattern = '*'\n{given}")
    elif isinstance(given, Mapping):
        rules = parse_rules([{**given, "pattern": "*"}])
    else:
        raise InvalidUsage(f"policy {label!r} is a persist.Policy, a mapping or TOML: got {shown(given)}")
    said = told(rules)
    if (others := sorted(said.keys() - REPLAYED)) or not said:
        what = f"{others[0]}, which a replay does not tell apart" if others else "nothing"
        raise InvalidUsage(f"policy {label!r} says {what}: say compaction_weight, compaction_ahead or retention")
    return ruled(own, said)


def history_of(name: str, log: Log) -> History:
    """The appends of a log. Pure but for the check of its chain; raises InvalidUsage where it has none."""
    there, known = list(_there(log.start.state)), list(_known(name, log))
    if not known:
        raise InvalidUsage(
            f"the log of shard {name!r} has no appends that are still known ({log.missing:,} transitions of it are "
            "truncated), so there is nothing to replay: look again once it was written to",
            shard=name,
        )
    assumed = []
    if log.missing or log.unread:
        assumed.append(
            f"{units.of(log.missing + log.unread, 'transition')} before are not known: the {len(there)} batches that "
            "were there are taken for appends that upkeep had merged"
        )
    if log.missing and len(known) < ENOUGH:
        assumed.append(
            f"upkeep truncates the log, and {units.of(len(known), 'append')} of it are known: they are taken for "
            f"typical, and happen again until there are {units.number(ENOUGH)}"
        )
        known = _again(known)
    if not any(one.is_tended for one in known):
        known = [one._replace(is_tended=number % EVERY == 0) for number, one in enumerate(known, 1)]
        assumed.append(f"no upkeep is in the log: it is taken to run after each {EVERY} appends")
    state = apply_rows(parse_shard_id(name), log.start, list(log.stored)).state if log.rows else log.start.state
    bytes_each = _bytes_each(log, there or known)
    assumed.append(
        f"a merged update takes {bytes_each:.1f} bytes; a merge with the oldest batch leaves the rows that count"
    )
    return History(name, (*there, *known), len(there), bytes_each, state.schemas[-1].times, tuple(assumed))


def _again(known: list[Appended]) -> list[Appended]:
    """The same appends one after the other, at later times and moments, until there are ENOUGH."""
    first, last = known[0], known[-1]
    gap = max(1, (last.now - first.now) // max(1, len(known) - 1))
    step_ms, step = last.now - first.now + gap, last.upper - first.upper + max(1, gap if first.upper > 1 << 40 else 1)
    moved = step if last.since != first.since else 0  # since follows, or stays where it is
    return [
        one._replace(now=one.now + turn * step_ms, upper=one.upper + turn * step, since=one.since + turn * moved)
        for turn in range(-(-ENOUGH // len(known)))
        for one in known
    ][:ENOUGH]


def _there(state: State) -> Iterator[Appended]:
    for batch in state.trace:
        if batch.count:
            inline = batch.inline_size == batch.size
            yield Appended(0, batch.upper.time or 0, 0, batch.count, batch.diff_sum, batch.size, inline)


def _known(name: str, log: Log) -> Iterator[Appended]:
    """The appends of the log, each with whether upkeep followed it before the next one."""
    id_, version, last = parse_shard_id(name), log.start, None
    for stored, row in zip(log.stored, log.rows, strict=True):
        version = apply_rows(id_, version, [stored])
        for step in row.steps:
            if step.diff is None or step.diff.trace is None or step.command in COMMANDS:
                if last is not None and step.command in COMMANDS:
                    last = last._replace(is_tended=True)
                continue
            for batch in step.diff.trace.added[-1:]:
                if last is not None:
                    yield last
                upper = batch.upper.time if batch.upper.time is not None else (batch.lower.time or 0) + 1
                since = version.state.since.time or 0
                inline = batch.inline_size == batch.size
                last = Appended(row.now, upper, since, batch.count, batch.diff_sum, batch.size, inline)
    if last is not None:
        yield last


def _bytes_each(log: Log, there: list[Appended]) -> float:
    """Bytes of an update in what upkeep wrote last, as far as the log has that; else in what was there."""
    steps = [step for row in log.rows for step in row.steps if step.command in COMMANDS and step.diff is not None]
    traces = [step.diff.trace for step in steps if step.diff is not None and step.diff.trace is not None]
    merged = [batch for trace in traces for batch in trace.added if batch.count]
    sized = [(b.size, b.count) for b in merged[-3:]] or [(one.size, one.updates) for one in there if one.updates]
    return max(1.0, sum(size for size, _ in sized) / sum(updates for _, updates in sized)) if sized else BYTES_EACH


def rows_of(found: Comparison) -> Iterator[tuple[str, ...]]:
    """The policies beside each other, a row for each figure."""
    columns: list[tuple[str, Any]] = [
        ("batches now, most", lambda one: f"{one.batches}, {one.most}"),
        ("rewritten for each update", lambda one: f"{one.rewritten:.2f}"),
        ("bytes written", lambda one: units.size(one.written)),
        ("bytes stored", lambda one: units.size(one.stored)),
        ("requests of upkeep", lambda one: units.number(one.cost.requests)),
        ("a read does, mean", lambda one: f"{one.read:.2f}x"),
        ("a read does, worst", lambda one: f"{one.worst:.2f}x"),
        ("bytes of a read", lambda one: units.size(one.read_size)),
        ("requests of a read", lambda one: f"{one.read_gets:.1f}"),
        ("dollars a month", lambda one: units.dollars(one.dollars_month)),
    ]
    for name, show in columns:
        yield (name, *(show(one) for one in found.found))
