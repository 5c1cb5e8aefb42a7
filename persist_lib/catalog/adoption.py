"""The transaction by which a shard becomes a member of a collection, and what follows from it for the catalog."""

from __future__ import annotations

from contextlib import suppress

from persist_lib.catalog.names import LAYER
from persist_lib.catalog.records import CollectionRecord, RenditionRecord, schema_form
from persist_lib.catalog.renditions import schema_for
from persist_lib.client import Client
from persist_lib.core import commands as c
from persist_lib.core import refusals as r
from persist_lib.core.formats import MEMBERS
from persist_lib.core.members import inheritance
from persist_lib.core.state import State
from persist_lib.errors import ShardFinished, UpperMismatch
from persist_lib.frontier import TOP
from persist_lib.ids import SeqNo
from persist_lib.runtime.ambient import Deadline
from persist_lib.shard.commit import Undone, Wanted, try_commit_all


def adopt(
    client: Client, collection: CollectionRecord, rendition: RenditionRecord, deadline: Deadline
) -> dict[str, object] | str:
    """Make a shard the member that the rendition is of, and let the rendition shard, which is there, take over from it.

    Answers the columns and the retention that it had then, or why it can never be. SUBTLE: a reason must hold for ever,
    as another process may be at the same. So the rendition shard is closed before it is one: what adopts moves its
    upper in the same transaction, and finds it closed.
    """
    shard, kept = client.machine(rendition.places[0]), client.machine(collection.shard)
    kept.try_commit(lambda _state, _now: c.Upgrade(MEMBERS))
    while True:
        state = shard.fetch().state
        if state.member == rendition.member:
            return {"schema": schema_form(state.schemas[-1]), "retention": state.retention}
        token = client.runtime.token()

        def adopting(_state: State, _now: int) -> c.Adopt:
            return c.Adopt(rendition.member, SeqNo(shard.version.seqno + 1))

        def inheriting(state: State, _now: int, token: bytes = token) -> c.Inherit:
            # SUBTLE: of the same version of the shard from which the other one was just made, in the same turn.
            return inheritance(shard.state, token, state.upper)

        done = try_commit_all((Wanted(shard, adopting), Wanted(kept, inheriting)), deadline, token)
        if not isinstance(done, Undone):
            continue
        refusals = [done.refusals[at] for at in sorted(done.refusals)]
        if any(isinstance(refusal, r.Overtaken) for refusal in refusals) and not deadline.has_passed():
            continue
        if _is_closed(client, collection, rendition):
            return shard.refused(refusals[0]).message


def _is_closed(client: Client, collection: CollectionRecord, rendition: RenditionRecord) -> bool:
    """Whether nothing can be adopted any more, after this: the rendition shard is closed where it was made."""
    try:
        with (
            client.open_writer(collection.shard, schema_for(rendition.columns.times), layer=LAYER) as write,
            suppress(UpperMismatch),  # it was adopted, or is closed, by a process that was faster
        ):
            write.compare_and_append([], 1, TOP)
    except ShardFinished:
        return True
    return client.machine(collection.shard).fetch().state.upper.is_top()
