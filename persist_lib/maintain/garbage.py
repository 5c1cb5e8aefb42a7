"""What may go: ids whose lease ended, history beyond the retention, garbage, log rows that no reader needs, orphans.

Blobs are deleted first, rows after. A process that dies in between leaves work that the next pass finds again. An
object that cannot be deleted stays on the list. If a listing fails, less is deleted, never more.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from persist_lib.core import commands as c
from persist_lib.core.cost import Cost
from persist_lib.core.formats import PINS
from persist_lib.core.plan.garbage import Held, plan_garbage, plan_orphans
from persist_lib.core.plan.retention import Kept, plan_retention, retention_of
from persist_lib.core.plan.upkeep import Overdue, plan_expiry
from persist_lib.core.plan.written import Seen, given_up
from persist_lib.core.state import RETENTION, State
from persist_lib.errors import PersistError
from persist_lib.format.paths import blob_key, key_of, parts_prefix, prefix
from persist_lib.frontier import Antichain
from persist_lib.ids import PartKey, SeqNo, parse_rollup_key
from persist_lib.location.api import BlobEntry, StaysInPlace, Upload
from persist_lib.location.wrap.around import sends_in_pieces
from persist_lib.location.wrap.spending import charged
from persist_lib.maintain.worker import Progress
from persist_lib.shard.commit import Committed, Machine
from persist_lib.telemetry import duty


class Expired(msgspec.Struct, frozen=True):
    """The ids that were retired, or would be."""

    overdue: tuple[Overdue, ...]
    live: int
    cost: Cost = Cost()
    """The requests that it made to the location. A dry run only reads."""


class Retained(msgspec.Struct, frozen=True):
    """How the shard's since moved. `distance` is its retention policy, in times behind upper; None: all is kept."""

    distance: int | None
    before: Antichain
    after: Antichain
    cost: Cost = Cost()
    """The requests that it made to the location. A dry run only reads."""
    says: str = ""
    """The policy for people, and why all is kept where it is; empty without a policy."""


@duty("leases")
@charged
def expire(machine: Machine, *, dry_run: bool = False, seen: Seen | None = None) -> Expired:
    """Retire the ids whose lease has ended by the store's clock. Their next commit is refused with LeaseExpired.

    Those of `seen`, if it is given, by the clock of then.
    """
    if not dry_run:
        machine.may_begin(machine.shard, "leases")
    state, now = (seen.version.state, seen.now) if seen else (machine.fetch().state, machine.consensus.now())
    overdue = tuple(plan_expiry(state, now))
    if overdue and not dry_run and not state.is_finished():
        answer = machine.try_commit(lambda _state, later: c.Expire(seen.now if seen else later))
        if not isinstance(answer, Committed):
            overdue = ()  # another process renewed or retired them first
    return Expired(overdue, len(state.writers) + len(state.readers))


@duty("retention")
@charged
def retain(
    machine: Machine, *, dry_run: bool = False, seen: Seen | None = None, by_rule: int | str | None = None
) -> Retained:
    """Advance the shard's `retention` hold to as far behind upper as its policy says, or said when it was `seen`.

    `by_rule` is what counts where the shard has no policy.
    """
    if not dry_run:
        machine.may_begin(machine.shard, "retention")
    state = (seen.version if seen else machine.fetch()).state
    planned, kept = plan_retention(state, by_rule), retention_of(state, by_rule) or Kept(None, "")
    if planned is None or dry_run:
        return Retained(kept.distance, state.since, state.since if planned is None else planned, says=kept.says)

    def move(state: State, _now: int) -> c.DowngradeHold:
        hold, target = state.holds.get(RETENTION), planned if seen else plan_retention(state, by_rule)
        since = target if target is not None else hold.since if hold else state.since
        return c.DowngradeHold(RETENTION, since, hold.opaque if hold else None, hold.opaque if hold else b"")

    answer = machine.commit(move)
    return Retained(kept.distance, state.since, answer.after.since, says=kept.says)


PAGE = 1000


class Collected(msgspec.Struct, frozen=True):
    """What a collection deleted, or would delete: objects, bytes, log rows.

    `held` is the garbage that must wait, and why. `failed` says why an object could not be deleted.
    """

    keys: tuple[PartKey, ...]
    size: int
    rows: int
    held: tuple[Held, ...]
    failed: dict[str, str]
    cost: Cost = Cost()
    """The requests that it made to the location. A dry run only reads."""


class Audited(msgspec.Struct, frozen=True):
    """What an audit found and deleted, or would delete.

    `size` is the bytes of the orphans. `swept` are the retired ids that have no objects left; `failed` says why an
    object could not be deleted.
    """

    orphans: tuple[PartKey, ...]
    size: int
    live: int
    pending: int
    swept: tuple[str, ...]
    failed: dict[str, str]
    loose_rollups: int = 0
    """Unlinked rollups newer than the newest linked one. A writer may still link them, until a newer one is linked."""
    uploads: int = 0
    """Aborted uploads, left unfinished by writers that are gone. Their pieces cost storage and appear in no listing."""
    uploads_size: int = 0
    """The bytes of these uploads, if the store reports them (S3 does not)."""
    cost: Cost = Cost()


@duty("garbage")
@charged
def collect(
    machine: Machine, *, dry_run: bool = False, progress: Progress | None = None, seen: Seen | None = None
) -> Collected:
    """Delete the garbage that no reader can reach, remove it from the state, and truncate the log.

    That of `seen`, if it is given: what no reader can reach, none ever can. Doing it again finds nothing to do. An
    object that cannot be deleted is in `failed`, and the next call tries again.
    """
    if not dry_run:
        machine.may_begin(machine.shard, "garbage")
    version = seen.version if seen else machine.fetch()
    plan = plan_garbage(version.state, version.seqno)
    if dry_run:
        return Collected(tuple(plan.keys), plan.size, 0, plan.held, {})
    failed = _delete(machine, tuple(plan.keys), progress)
    gone = tuple(key for key in plan.keys if key not in failed)
    if gone:
        machine.try_commit(lambda state, _now: c.ForgetGarbage(tuple(key for key in gone if key in state.garbage)))
    below = plan.truncate_below
    rows = machine.consensus.truncate(machine.shard, below) if below > 1 else 0
    return Collected(gone, sum(plan.keys[key] for key in gone), rows, plan.held, failed)


@duty("orphans")
@charged
def audit_orphans(
    machine: Machine, *, dry_run: bool = False, progress: Progress | None = None, seen: Seen | None = None
) -> Audited:
    """List the shard's objects, then read its state, then delete the objects that no writer can ever link.

    Those of `seen`, if it is given. Doing it again finds nothing to do. An object that cannot be deleted is in
    `failed`, and the next call tries again.
    """
    if not dry_run:
        machine.may_begin(machine.shard, "orphans")
    seen = seen or see(machine, ("orphans",), now=0)
    listed, uploads, failed = seen.listed, seen.uploads, dict(seen.failed)
    plan = plan_orphans(seen.version.state, listed, uploads)
    abandoned = given_up(plan, uploads)
    if not dry_run:
        failed |= _delete(machine, tuple(plan.keys), progress) | _abort(machine, abandoned)
        if plan.swept:
            machine.try_commit(
                lambda state, _now: c.ForgetRetired(tuple(id_ for id_ in plan.swept if id_ in state.retired))
            )
    gone = tuple(key for key in plan.keys if key not in failed)
    size = sum(plan.keys[key] for key in gone)
    newest = seen.version.state.newest_rollup
    loose = sum(1 for key, _ in listed if (parse_rollup_key(key) or 0) > newest)
    aborted = [upload.size for upload in abandoned if upload.id not in failed]
    return Audited(gone, size, plan.live, plan.pending, plan.swept, failed, loose, len(aborted), sum(aborted))


def see(machine: Machine, duties: Collection[str] = (), now: int | None = None) -> Seen:
    """What these duties are planned from: one version, and what has to be listed before it is read.

    `now` is ms of the store's clock; None: that of now.
    """
    listed, uploads, failed = list[tuple[PartKey, int]](), dict[PartKey, list[Upload]](), dict[str, str]()
    if "orphans" in duties:
        listed = [(key_of(machine.shard, entry.key), entry.size) for entry in objects_of(machine)]
        uploads, failed = _unfinished(machine)
    version, begins = machine.fetch(), SeqNo(1)
    if "garbage" in duties and plan_garbage(version.state, version.seqno).truncate_below > 1:
        oldest = machine.consensus.scan(machine.shard, SeqNo(0), 1)
        begins = oldest[0].seqno if oldest else begins
    now = machine.consensus.now() if now is None else now
    return Seen(version, now, begins, listed, uploads, failed)


def places_of(machine: Machine) -> list[str]:
    """What the keys in Blob begin with of all that the shard's state may refer to, but for its pending area.

    Parts stand below a publication's folder from a format on. What is known of the state may be old: then less is
    listed.
    """
    is_published = machine.state.format >= PINS
    return [prefix(machine.shard), *([parts_prefix(machine.shard)] if is_published else [])]


def objects_of(machine: Machine) -> list[BlobEntry]:
    """All objects that the shard's state may refer to, but for its pending area."""
    return [entry for below in places_of(machine) for entry in machine.blob.list(below)]


def together(first: Audited, second: Audited) -> Audited:
    """What two audits in a row found."""
    names = ("orphans", "size", "swept", "uploads", "uploads_size", "cost")
    return msgspec.structs.replace(second, **{name: getattr(first, name) + getattr(second, name) for name in names})


def _unfinished(machine: Machine) -> tuple[dict[PartKey, list[Upload]], dict[str, str]]:
    """Unfinished uploads by key, and why they could not be listed. Orphans are deleted also when that listing fails."""
    found: dict[PartKey, list[Upload]] = {}
    if (blob := sends_in_pieces(machine.blob)) is not None:
        try:
            for upload in (one for below in places_of(machine) for one in blob.uploads(below)):
                found.setdefault(key_of(machine.shard, upload.key), []).append(upload)
        except PersistError as error:
            return {}, {"unfinished uploads": str(error)}
    return found, {}


def _abort(machine: Machine, uploads: list[Upload]) -> dict[str, str]:
    """An upload that could not be aborted is named by its id. Its key may be that of a deleted orphan."""
    if uploads:
        check_in_place(machine)
    if not uploads or (blob := sends_in_pieces(machine.blob)) is None:
        return {}
    return {upload.id: f"{upload.key}: {error}" for upload, error in blob.abort_uploads(uploads).items()}


def _delete(machine: Machine, keys: tuple[PartKey, ...], progress: Progress | None) -> dict[str, str]:
    failed: dict[str, str] = {}
    for start in range(0, len(keys), PAGE):
        page = {blob_key(machine.shard, key): key for key in keys[start : start + PAGE]}
        check_in_place(machine)
        errors = machine.blob.delete_many(list(page))
        failed |= {page[key]: str(error) for key, error in errors.items()}
        if progress is not None:
            progress(min(start + PAGE, len(keys)), len(keys))
    return failed


def check_in_place(machine: Machine) -> None:
    """Raise unless the log from which a deletion was decided is still the one that other processes commit to."""
    if isinstance(machine.consensus, StaysInPlace):
        machine.consensus.check_in_place()
