"""What would be given up of collections, as a plan: shown, written down, and done exactly, or not.

Steps that finish what was begun, or make readable what is there (`settle`, `promise`, `apply` …), are in no plan: they
give nothing up, and readers wait for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from persist_lib.arguments import shown
from persist_lib.catalog.describe import Tended
from persist_lib.core.plan.written import COLLECTIONS, Step
from persist_lib.errors import InvalidUsage, PlanMoved

if TYPE_CHECKING:
    from persist_lib.catalog.controller import Controller


def plan(controller: Controller, name: str | None, timeout: float | None) -> tuple[Step, ...]:
    """The steps of a collection, or of all, that would give something up now. Changes nothing."""
    return steps_of(controller.tend(name, dry_run=True, timeout=timeout))


def exactly_of(steps: object) -> list[tuple[str, ...]]:
    """What steps of a plan are exactly. Raises InvalidUsage for what is no list of them."""
    if not isinstance(steps, (list, tuple)) or not all(isinstance(step, Step) for step in steps):
        raise InvalidUsage(f"steps are what Controller.plan answers: got {shown(steps)}", argument="steps")
    return [step.exactly for step in steps]


def steps_of(found: Tended) -> tuple[Step, ...]:
    """Of what a dry run found, the steps of a plan."""
    return tuple(
        Step(COLLECTIONS, f"{one.action} {one.subject}", one.reason, one.exactly) for one in found.steps if one.gives_up
    )


def apply(controller: Controller, steps: Sequence[Step], timeout: float | None) -> Tended:
    """Take exactly these steps, and those that give nothing up; or raise PlanMoved, and take none.

    Each is compared with what would be done just before it is taken. So a rival in between makes that fewer are taken,
    and never others: what was left waits, in the answer.
    """
    if not exactly_of(steps):
        return Tended(())
    names = dict.fromkeys(step.exactly[0] for step in steps)
    now = plan(controller, None, timeout)
    for name in names:
        if (was := _of(steps, name)) != (is_ := _of(now, name)):
            other = sorted(f"{action} {subject}" for _, action, subject in was ^ is_)
            raise PlanMoved(
                f"collection {name}: it has moved since this plan was made: of {', '.join(other[:3])} not all is both "
                "planned and due. Where the plan was carried out before, it is done. Nothing was changed; plan again: "
                f"`persist maintain {name} --plan FILE`",
                collection=name,
            )  # fmt: skip
    return controller.tend(planned=steps, timeout=timeout)


def _of(steps: Iterable[Step], name: str) -> set[tuple[str, ...]]:
    return {step.exactly for step in steps if step.exactly[0] == name}
