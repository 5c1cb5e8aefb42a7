"""Erasing keys from a table for ever: what carries it rewrites what has them, and says what still has them, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist_lib.core.cost import Cost
from persist_lib.core.leases import keepers
from persist_lib.core.state import COLLECTION, RETENTION
from persist_lib.errors import InvalidUsage
from persist_lib.frontier import Antichain, at
from persist_lib.kernel.columns import Rows
from persist_lib.kernel.keyset import Keys
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.erase import ErasedShard, Found, Sought, erase, search
from persist_lib.maintain.worker import Progress, Worker
from persist_lib.relation.row_selection import Asked, keys_of
from persist_lib.relation.statements import Delete

if TYPE_CHECKING:
    from persist_lib.table.carrier import Carrier, Wal

OWN = {f"hold {RETENTION}", f"hold {COLLECTION}"}
"""The holds of a table's own retention, which an erasure moves."""


ROUNDS = 4
"""How often it is tried again while less is left: what reads here sees what was replaced, and lets go of it."""


class Erased(msgspec.Struct, frozen=True):
    """A receipt: what an erasure did, as of what each shard was found to have by a scan afterwards.

    `keys` is how many were asked for, and `deleted` how many of them had rows, which this call took away. The history
    of the whole table before `since` was given up; it was readable from `since_before` on. It is complete, for ever, if
    `left` is empty: else that says what still has them and why, and the same call continues. `shards` has the objects
    that had them, with their digests. `in_the_way` are readers and holds that keep history in which they are, `store`
    says what Consensus may still have of rows that it deleted. With `dry_run` it says what would be done, and `left` is
    all that has them.
    """

    table: str
    keys: int
    deleted: int
    since_before: Antichain
    since: Antichain
    shards: tuple[ErasedShard, ...]
    in_the_way: tuple[str, ...]
    store: str = ""
    dry_run: bool = False
    cost: Cost = Cost()

    @property
    def left(self) -> tuple[str, ...]:
        """What still has some of the keys, and why: a sentence each."""
        return (
            *(f"shard {one.shard}, {place}: {why}" for one in self.shards for place, why in one.left),
            *([f"Consensus: {self.store}"] if self.store else []),
        )


DUTIES = ("compaction", "rollups", "garbage", "orphans")
"""What an erasure does of these on its own, and so does not begin where one is paused."""


@charged
def erase_keys(
    on: Carrier, keys: object, *, dry_run: bool, timeout: float | None, progress: Progress | None = None
) -> Erased:
    """Take the rows of these keys away, give up the history in which they are, and rewrite what has them."""
    wanted, before = keys_of(on.schema, keys), on.describe()
    if before.keep_deletes is not None:
        raise InvalidUsage(
            f"table {on.name!r} keeps deleted keys, and these would be among them. Nothing was changed. Give that up "
            "first, with set_keep_deletes(None), which forgets all of them",
            table=on.name,
        )
    if not len(wanted):
        return Erased(on.name, 0, 0, before.since, before.since, (), (), dry_run=dry_run)
    for shard in () if dry_run else on.shards_everywhere():
        for duty in DUTIES:
            on.client.machine(shard).may_begin(shard, duty)
    if dry_run:
        with on.read(None, Asked(keys=wanted.table), newest=True, timeout=timeout) as now:
            deleted = len(Keys.of(on.schema, now.to_arrow()))
    else:
        delete = partial(Delete, on.name, keys=wanted.table, filter=None)
        deleted = on.execute(delete, token=None, timeout=timeout).deleted
    on._let_all_go()
    wal = on.settle(timeout, dry_run=dry_run)
    soughts = {shard: _sought(on, shard, wanted, wal) for shard in on.shards_everywhere()}
    found = {shard: search(on.client.machine(shard), sought) for shard, sought in soughts.items()}
    until = max((one.until for shard, one in found.items() if soughts[shard].is_by_key), default=-1)
    if dry_run:
        since = before.since.join(before.upper if deleted else at(max(0, until)))
        shards, store = [_unchanged(shard, one) for shard, one in found.items()], ""
        in_the_way = _in_the_way(on, shards, since)
    else:
        shards = _erase_everywhere(on, soughts, found, until, timeout, progress)
        since, store = on.describe().since, on.client.consensus.overwrite()
        in_the_way = _in_the_way(on, shards, at(max(0, until)))
    return Erased(on.name, len(wanted), deleted, before.since, since, tuple(shards), in_the_way, store, dry_run=dry_run)


def _erase_everywhere(
    on: Carrier, soughts: Mapping[str, Sought], found: Mapping[str, Found], until: int, timeout: float | None,
    progress: Progress | None,
) -> list[ErasedShard]:  # fmt: skip
    """Erase from each shard in which something was found, as far as history up to `until` goes."""
    done = {shard: _unchanged(shard, one) for shard, one in found.items()}
    left: tuple[object, ...] = ()
    for turn in range(ROUNDS):
        for _ in range(2):  # readers of this program let go as far as the hold has moved, and holds as far as readers
            if until >= 0:
                on.give_up(until, timeout)
            on._let_all_go()
        for number, (shard, sought) in enumerate(soughts.items()):
            if done[shard].left:
                with Worker(on.client.machine(shard), on.client.leases) as worker:
                    where = search(worker.machine, sought) if turn else found[shard]
                    done[shard] = erase(worker.machine, worker, sought, where, done[shard])
            if progress is not None and not turn:
                progress(number + 1, len(soughts))
        before, left = left, tuple(one.left for one in done.values())
        if left == before or not any(left):
            break
    return list(done.values())


def _unchanged(shard: str, found: Found) -> ErasedShard:
    """What is to be said of a shard in which nothing was done."""
    left = tuple((place, "it has some") for place in found.places)
    return ErasedShard(shard, found.seqno, (), left, found.objects, found.rows)


def _in_the_way(on: Carrier, shards: Sequence[ErasedShard], since: Antichain) -> tuple[str, ...]:
    """The readers and holds that keep history before `since` where something is left, but for the table's own."""
    places = [one.shard for one in shards if one.left]
    states = (on.client.machine(shard).fetch().state for shard in ([on.kept_by(), *places] if places else []))
    found = dict.fromkeys(name for state in states for name in keepers(state, since))
    return tuple(name for name in found if name not in OWN)


def _sought(on: Carrier, shard: str, keys: Keys, wal: Wal | None) -> Sought:
    """What is looked for in a shard: the keys; in a WAL, what it has of the table; elsewhere all that there is."""
    schemas = on.client.machine(shard).fetch().state.schemas
    if wal is not None and shard == wal.shard:
        return Sought(lambda _least, _most: True, partial(_of_table, wal), is_by_key=False)
    if schemas and schemas[-1].key != on.schema.key:
        return Sought(lambda _least, _most: True, lambda table: np.arange(table.num_rows), is_by_key=False)
    return Sought(keys.any_between, keys.find)


def _of_table(wal: Wal, rows: pa.Table) -> Rows:
    """The rows of a WAL with what a table got up to a time; marks have nothing of it."""
    wanted = pc.and_(
        pc.equal(rows.column("table"), wal.table), pc.less_equal(rows.column("at"), pa.scalar(wal.until, pa.uint64()))
    )
    return np.flatnonzero(pc.and_(wanted, pc.greater_equal(rows.column("chunk"), 0)).to_numpy(zero_copy_only=False))
