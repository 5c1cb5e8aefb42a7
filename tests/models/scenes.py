"""The bounds within which each model is explored, by day and at night, and the mistakes that must break a claim."""

from __future__ import annotations

from dataclasses import dataclass, field

Bounds = dict[str, int]


@dataclass(frozen=True, slots=True)
class Scene:
    """Some of a model's processes, and how often each acts."""

    file: str
    name: str
    day: Bounds
    night: Bounds


@dataclass(frozen=True, slots=True)
class Mutant:
    """A model with one mistake, the claim that it breaks, and bounds in which it does."""

    file: str
    name: str
    claim: str
    bounds: Bounds = field(default_factory=dict)


def _shard(**more: int) -> Bounds:
    """A shard with one writer; everybody else is left out but those that are named."""
    alone = {"COMPACTORS": 0, "ROLLS": 0, "COLLECTS": 0, "AUDITS": 0, "EXPIRES": 0, "TAKES": 0, "HOLD": 0, "DOUBTS": 0}
    return {"T": 2, "WRITERS": 1, **alone, **more}


_OUTCOMES = {"WRITERS": 2, "DOUBTS": 1, "EXPIRES": 1, "ROLLS": 1, "COLLECTS": 1}
_RECLAIM = {"COMPACTORS": 1, "ROLLS": 1, "COLLECTS": 1, "TAKES": 1}
_ORPHANS = {"COMPACTORS": 1, "ROLLS": 1, "AUDITS": 1, "EXPIRES": 1, "DOUBTS": 1}
_HISTORY = {"COMPACTORS": 1, "TAKES": 2, "HOLD": 1}
_RIVALS = {"COMPACTORS": 2, "DOUBTS": 1, "T": 3, "APPENDS": 3}

SCENES = (
    Scene("shard.pml", "outcomes", _shard(**_OUTCOMES, APPENDS=1), _shard(**{**_OUTCOMES, "DOUBTS": 2, "T": 3})),
    Scene(
        "shard.pml", "reclaiming", _shard(**_RECLAIM), _shard(**{**_RECLAIM, "ROLLS": 2, "COLLECTS": 2, "EXPIRES": 1})
    ),
    Scene("shard.pml", "orphans", _shard(**_ORPHANS), _shard(**{**_ORPHANS, "WRITERS": 2, "ROLLS": 1, "RESTS": 1})),
    Scene("shard.pml", "history", _shard(**_HISTORY), _shard(**{**_HISTORY, "T": 3, "APPENDS": 3, "EXPIRES": 1})),
    Scene("shard.pml", "rivals", _shard(**_RIVALS), _shard(**{**_RIVALS, "EXPIRES": 1, "ROLLS": 1, "COLLECTS": 1})),
    Scene(
        "shard.pml",
        "at rest",
        _shard(COMPACTORS=1, ROLLS=1, COLLECTS=1, RESTS=1),
        _shard(**_RECLAIM, RESTS=1, DOUBTS=1),
    ),
    Scene("groups.pml", "two servers", {}, {"CLIENTS": 3, "DOUBTS": 2}),
    Scene("wal.pml", "a handover", {}, {"T": 5, "TRUNCATIONS": 3}),
    Scene("sources.pml", "two instances", {"T": 2}, {"RESTARTS": 2}),
)

MUTANTS = (
    Mutant("shard.pml", "retry_without_looking", "is_once", _shard(DOUBTS=1)),
    Mutant("shard.pml", "lost_when_refused", "is_answered", _shard(DOUBTS=1)),
    Mutant("shard.pml", "lease_does_not_fence", "is_present", _shard(EXPIRES=1, AUDITS=1)),
    Mutant("shard.pml", "compaction_looks_at_nothing", "is_exact", _shard(COMPACTORS=2, T=3, APPENDS=3)),
    Mutant("shard.pml", "compaction_takes_what_came_since", "is_exact", _shard(COMPACTORS=1, T=3, APPENDS=3)),
    Mutant("shard.pml", "inputs_deleted_before_the_row", "is_present", _shard(COMPACTORS=1)),
    Mutant("shard.pml", "outputs_deleted_when_in_doubt", "is_present", _shard(COMPACTORS=1, DOUBTS=1)),
    Mutant("shard.pml", "rollup_of_what_is_in_doubt", "is_committed", _shard(ROLLS=1)),
    Mutant("shard.pml", "collector_ignores_readers", "is_readable", _shard(**_RECLAIM)),
    Mutant("shard.pml", "truncation_ignores_readers", "rebuilds", _shard(**_RECLAIM)),
    Mutant("shard.pml", "collector_needs_no_rollup", "is_committed", _shard(COMPACTORS=1, ROLLS=1, COLLECTS=1)),
    Mutant("shard.pml", "truncated_past_the_rollup", "opens", _shard(ROLLS=1, COLLECTS=1)),
    Mutant("shard.pml", "staged_objects_are_swept", "is_present", _shard(AUDITS=1)),
    Mutant("shard.pml", "audit_reads_before_it_lists", "is_present", _shard(AUDITS=1)),
    Mutant("shard.pml", "since_ignores_readers", "is_held", _shard(TAKES=1, HOLD=1)),
    Mutant("shard.pml", "release_gives_up_history", "is_held", _shard(TAKES=1, HOLD=1)),
    Mutant("shard.pml", "outputs_become_garbage_too", "is_unlinked", _shard(COMPACTORS=1)),
    Mutant("shard.pml", "parts_of_the_retired_are_left", "is_swept", _shard(EXPIRES=1, RESTS=1)),
    Mutant("groups.pml", "refused_commands_move_upper", "is_contiguous"),
    Mutant("groups.pml", "tokens_are_not_looked_up", "is_once"),
    Mutant("groups.pml", "all_are_answered_alike", "is_answered"),
    Mutant("groups.pml", "refusal_told_while_a_copy_is_on_its_way", "is_answered"),
    Mutant("wal.pml", "applied_twice", "is_once"),
    Mutant("wal.pml", "applies_without_a_promise", "is_ended"),
    Mutant("wal.pml", "span_not_looked_at_again", "is_ended"),
    Mutant("wal.pml", "handover_below_the_promise", "is_ended"),
    Mutant("wal.pml", "handover_below_the_wal", "is_settled"),
    Mutant("wal.pml", "copied_as_far_as_promised", "is_whole"),
    Mutant("wal.pml", "truncated_before_it_is_applied", "is_whole"),
    Mutant("wal.pml", "truncation_forgets_the_old_rendition", "is_whole"),
    Mutant("sources.pml", "marks_may_go_back", "is_forward"),
    Mutant("sources.pml", "old_marks_are_not_verified", "is_one_life"),
    Mutant("sources.pml", "checks_of_marks_are_not_compared", "is_one_life"),
    Mutant("sources.pml", "mint_without_comparing", "is_at_its_time"),
    Mutant("sources.pml", "own_proposal_instead_of_the_binding", "is_whole"),
    Mutant("sources.pml", "begins_where_the_upstream_begins", "is_whole", {"RESTARTS": 0}),
    Mutant("sources.pml", "window_written_as_a_whole", "is_once"),
    Mutant("sources.pml", "hold_follows_the_errors", "is_held"),
    Mutant("sources.pml", "told_what_is_read", "is_there"),
    Mutant("sources.pml", "told_by_the_errors", "is_there"),
)
