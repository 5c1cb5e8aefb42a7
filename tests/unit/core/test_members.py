"""A member takes from those that name it what was for everybody before; and what becoming one changes, in both shards.

Tests are named after what goes wrong without the rule: a mutant of the exhaustive model of a promotion.
"""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.deciding import is_out_for_ever
from persist_lib.core.formats import MEMBERS, SCHEMAS_SAY_MORE
from persist_lib.core.members import inheritance
from persist_lib.core.plan.retention import plan_retention
from persist_lib.core.state import COLLECTION, NAMED, RETENTION, Hold, Produced, State
from persist_lib.core.transitions import apply
from persist_lib.core.validate import check_state
from persist_lib.errors import NewerFormat
from persist_lib.format import log
from persist_lib.frontier import MINIMUM, TOP, Antichain, at
from persist_lib.ids import SeqNo, format_reader_id, format_writer_id
from persist_lib.schema.schema import Schema
from tests.unit.core.core_shard import SCHEMA, WRITER, batch
from tests.unit.core.rights_of_commands import every_command_with_its_rights

MEMBER = "c00000000000000ab/1"
READER, LATE = format_reader_id(1), format_reader_id(2)
LOWER = at(1)


def after(*commands: c.Command, state: Any = None, first: int = 1) -> Any:
    state = State() if state is None else state
    for number, command in enumerate(commands, first):
        state = apply(state, SeqNo(number), command)
        if not isinstance(state, State):
            return state
        check_state(state, SeqNo(number))
    return state


CREATE = c.Create(SCHEMA, SCHEMAS_SAY_MORE)
LONE = (
    CREATE, c.Upgrade(MEMBERS), c.RegisterWriter(WRITER, "ingest", 99), c.RegisterReader(READER, 99),
    c.CompareAndAppend(WRITER, b"a", batch(0, 9), 99, ("loader", 7)), c.SetRetention(3),
    c.SetHold("audit", at(4), None, b"\x00mine"), c.DowngradeSince(READER, at(4), SeqNo(1), 99),
    c.DowngradeHold(RETENTION, at(4), b"", b""),
)  # fmt: skip
"""A shard that was written up to 9, and is read from 4 on."""
SEQNO = SeqNo(len(LONE) + 1)
ADOPT = c.Adopt(MEMBER, SEQNO)
APPEND = c.CompareAndAppend(WRITER, b"late", batch(9, 10), 99)


@pytest.fixture
def lone() -> State:
    state: State = after(*LONE)
    assert (state.since, state.upper) == (at(4), at(9))
    return state


@pytest.fixture
def member() -> State:
    state: State = after(*LONE, ADOPT)
    return state


@pytest.fixture
def renditions() -> State:
    """A rendition shard that was just made: its upper is 1."""
    made = (
        CREATE,
        c.Upgrade(MEMBERS),
        c.RegisterWriter(WRITER, "ingest", 99),
        c.SetHold(COLLECTION, MINIMUM, None, b""),
    )
    state: State = after(*made, c.CompareAndAppend(WRITER, b"r", batch(0, 1), 99))
    return state


BY_NAME: dict[str, c.Command] = {
    "an append": APPEND,
    "an append at the next time": c.AppendNow(WRITER, b"late", batch(9, 10), 99, SEQNO),
    "a definite append": c.Append(WRITER, b"late", batch(9, 10), 99),
    "pending batches": c.Absorb(WRITER, b"late", batch(9, 10), (), 99),
    "a writer": c.RegisterWriter(format_writer_id(2), "ingest", 99, "", "collection"),
    "a reader": c.RegisterReader(LATE, 99),
    "a clone of a reader": c.CloneReader(LATE, READER, 99),
    "a hold": c.SetHold("mine", at(5), None, b""),
    "moving a hold": c.DowngradeHold(COLLECTION, at(8), b"", b""),
    "releasing a hold": c.ReleaseHold(COLLECTION, b""),
    "retention": c.SetRetention(1),
    "forgetting a producer": c.ForgetProducer("loader", 7),
    "numbers": c.Reserve("id", 1, 5),
    "columns": c.EvolveSchema(0, Schema(SCHEMA.key, {"v": "int64"})),
    "an end": c.Finish(),
}


@pytest.mark.parametrize("command", BY_NAME.values(), ids=BY_NAME)
def test_no_fence_a_member_refuses_what_does_not_name_it(member: State, command: Any) -> None:
    """Also `hold_by_name`: a hold by the shard's name would keep nothing that the collection knows of."""
    now = SeqNo(SEQNO + 1)
    assert apply(member, now, command) == r.OfMember(MEMBER)
    assert apply(member, now, msgspec.structs.replace(command, member="c00000000000000ab/2")) == r.OfMember(MEMBER)
    assert not isinstance(apply(member, now, msgspec.structs.replace(command, member=MEMBER)), r.OfMember)
    assert is_out_for_ever(member, command), "so that a server may tell the sender for certain"


def test_every_command_that_names_a_member_is_tried() -> None:
    fenced = {kind for kind in get_args(c.Command) if issubclass(kind, c.NamesMember)}
    assert {type(command) for command in BY_NAME.values()} == fenced


@pytest.mark.parametrize(
    "command",
    [command for _, command, _ in every_command_with_its_rights() if not isinstance(command, (c.NamesMember, c.Adopt))],
)
def test_leases_and_upkeep_of_a_member_are_for_everybody(member: State, command: c.Command) -> None:
    assert not isinstance(apply(member, SeqNo(SEQNO + 1), command), r.OfMember)
    maintains = c.RegisterWriter(format_writer_id(3), "maintenance", 99)
    assert isinstance(after(maintains, state=member, first=SEQNO + 1), State)
    assert isinstance(after(c.DowngradeSince(READER, at(6), SeqNo(1), 99), state=member, first=SEQNO + 1), State)
    assert isinstance(after(c.Retire(READER), state=member, first=SEQNO + 1), State)


def test_whoever_appended_before_learns_that_it_did(member: State) -> None:
    again = c.CompareAndAppend(WRITER, b"a", batch(0, 9), 99)
    assert isinstance(apply(member, SeqNo(SEQNO + 1), again), r.AlreadyDone)
    numbered = msgspec.structs.replace(APPEND, producer=("loader", 7))
    assert isinstance(apply(member, SeqNo(SEQNO + 1), numbered), r.AlreadyProduced)


def test_since_free_a_member_keeps_its_history_when_the_last_reader_goes(member: State) -> None:
    assert dict(member.holds) == {COLLECTION: Hold(at(4))}
    assert member.retention == 3, "the catalog is told it"
    assert plan_retention(member) is None
    gone = after(c.Retire(READER), c.RegisterReader(LATE, 99, "", member=MEMBER), state=member, first=SEQNO + 1)
    moved = after(c.DowngradeSince(LATE, at(8), SeqNo(1), 99), state=gone, first=SEQNO + 3)
    assert moved.since == at(4)


def test_a_member_keeps_its_log_its_data_and_its_live_ids(lone: State, member: State) -> None:
    for name in ("trace", "writers", "readers", "schemas", "outcomes", "producers", "since", "retired"):
        assert getattr(member, name) == getattr(lone, name), name
    assert member.member == MEMBER
    appended = after(msgspec.structs.replace(APPEND, member=MEMBER), state=member, first=SEQNO + 1)
    assert appended.upper == at(10)


def test_split_only_the_very_next_transition_adopts(lone: State) -> None:
    raced = after(APPEND, state=lone, first=SEQNO)
    assert apply(raced, SeqNo(SEQNO + 1), ADOPT) == r.Overtaken(SEQNO, SeqNo(SEQNO + 1))


@pytest.mark.parametrize(
    ("before", "refusal"),
    [
        ((c.SetHold("stream", at(4), None, b""),), r.OfLayer),
        ((c.SetHold("copy-r2", at(4), None, b""),), r.OfLayer),
        ((c.CompareAndAppend(WRITER, b"z", msgspec.structs.replace(batch(9, 10), upper=TOP), 99),), r.InvalidBounds),
        ((c.ReleaseHold("audit", b"\x00mine"), c.ReleaseHold(RETENTION, b""),
          c.DowngradeSince(READER, at(20), SeqNo(1), 99)), r.InvalidBounds),
        ((c.ReleaseHold("audit", b"\x00mine"), c.Retire(READER), c.Finish()), r.Finished),
        ((ADOPT,), r.AlreadyDone),
    ],
    ids=["of a stream", "copied", "closed", "since beyond upper", "finished", "adopted"],
)  # fmt: skip
def test_what_cannot_be_adopted_is_refused(lone: State, before: Any, refusal: Any) -> None:
    state = after(*before, state=lone, first=SEQNO)
    now = SeqNo(SEQNO + len(before))
    assert isinstance(apply(state, now, c.Adopt(MEMBER, now)), refusal)


def test_a_place_that_goes_to_the_next_epoch_refuses_who_names_the_former_one_and_stays_what_it_is(
    member: State,
) -> None:
    now = SeqNo(SEQNO + 1)
    later = "c1/9"
    moved: Any = apply(member, now, c.Adopt(later, now, MEMBER))
    assert moved == msgspec.structs.replace(member, member=later), "nothing else changes"
    named = {name: msgspec.structs.replace(command, member=MEMBER) for name, command in BY_NAME.items()}
    for command in named.values():
        assert apply(moved, SeqNo(now + 1), command) == r.OfMember(later)
        assert is_out_for_ever(moved, command)
    appended = msgspec.structs.replace(APPEND, member=later)
    assert isinstance(apply(moved, SeqNo(now + 1), appended), State)
    assert isinstance(apply(moved, SeqNo(now + 1), c.Adopt(later, SeqNo(now + 1), MEMBER)), r.AlreadyDone)
    for former in (None, "", "c2/0"):
        assert apply(member, now, c.Adopt(later, now, former)) == r.OfMember(MEMBER)
    assert isinstance(apply(member, now, c.Adopt(later, SEQNO, MEMBER)), r.Overtaken)
    assert not is_out_for_ever(member, c.Adopt(later, now, MEMBER))
    assert is_out_for_ever(moved, c.Adopt(later, now, MEMBER))


def test_no_format_a_shard_of_an_older_format_is_no_member_and_older_programs_refuse_one(
    member: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = (LONE[0], c.Upgrade(MEMBERS - 1), *LONE[2:])
    assert after(*older, ADOPT) == r.NeedsFormat("whose member it is", MEMBERS, MEMBERS - 1)
    assert after(CREATE, inheritance(State(), b"t", MINIMUM)) == r.NeedsFormat(
        "what it takes over", MEMBERS, SCHEMAS_SAY_MORE
    )
    data = log.encode_state(log.StoredState(SEQNO, bytes(16), member))
    monkeypatch.setattr("persist_lib.format.log.NEWEST", MEMBERS - 1)
    with pytest.raises(NewerFormat):
        log.decode_state(data, "rollup")


def test_a_member_of_no_known_form_is_never_stored(lone: State) -> None:
    for name in ("", "c1", "c1/x", "C1/1", "c1/1/1", "/1"):
        assert isinstance(apply(lone, SEQNO, c.Adopt(name, SEQNO)), r.Malformed)


def inherited(lone: State, renditions: State, lower: Antichain = LOWER) -> Any:
    return after(inheritance(lone, b"adopt", lower), state=renditions, first=50)


def test_no_holds_and_no_named_users_holds_go_along_with_one_for_readers_by_name(
    lone: State, renditions: State
) -> None:
    found = inherited(lone, renditions)
    mine, kept = Hold(at(4), b"\x00mine"), Hold(at(4))
    assert dict(found.holds) == {"audit": mine, COLLECTION: kept, NAMED: kept}
    assert found.since == at(4)


def test_no_producers_a_number_that_was_committed_by_name_is_not_committed_again(
    lone: State, renditions: State
) -> None:
    found = inherited(lone, renditions)
    assert dict(found.producers) == {"loader": Produced(7, SeqNo(50), at(9), 0)}
    again = c.CompareAndAppend(WRITER, b"x", batch(9, 10), 99, ("loader", 7))
    assert isinstance(apply(found, SeqNo(51), again), r.AlreadyProduced)


def test_promise_low_what_was_written_by_name_is_promised(lone: State, renditions: State) -> None:
    assert inherited(lone, renditions).upper == lone.upper == at(9)


def test_what_is_taken_over_can_be_read_and_always_moves_upper(lone: State, renditions: State) -> None:
    empty = after(CREATE, c.Upgrade(MEMBERS))
    assert inherited(empty, renditions).upper == at(2), "who closes the rendition shard at 1 has kept the adoption out"
    beyond = msgspec.structs.replace(lone, since=at(9), holds={}, readers={})
    assert inherited(beyond, renditions).upper == at(10)


def test_a_rendition_shard_takes_over_once(lone: State, renditions: State) -> None:
    found = inherited(lone, renditions)
    command = inheritance(lone, b"adopt", LOWER)
    assert apply(found, SeqNo(51), command) == r.WrongUpper(LOWER, at(9))
    assert is_out_for_ever(found, command)
    assert not is_out_for_ever(renditions, command)


def test_a_member_is_stored_and_read_again(member: State) -> None:
    version = log.StoredState(SEQNO, bytes(16), member)
    assert log.decode_state(log.encode_state(version), "rollup").state == member


@pytest.mark.parametrize(
    "used",
    [c.RegisterReader(READER, 99), c.SetHold("mine", MINIMUM, None, b""),
     c.CompareAndAppend(WRITER, b"p", batch(1, 2), 99, ("loader", 9))],
    ids=["a reader", "a hold", "a producer"],
)  # fmt: skip
def test_a_rendition_shard_that_is_in_use_takes_nothing_over(lone: State, renditions: State, used: c.Command) -> None:
    state = after(used, state=renditions, first=50)
    assert isinstance(apply(state, SeqNo(51), inheritance(lone, b"adopt", state.upper)), r.Held)


def test_no_hold_is_taken_over_that_keeps_nothing(lone: State, renditions: State) -> None:
    low = msgspec.structs.replace(inheritance(lone, b"adopt", LOWER), holds=(("low", Hold(at(3))),))
    assert apply(renditions, SeqNo(50), low) == r.BelowSince(at(3), at(4))
