"""What is certain of each event that was under way when the loop stopped, and how its submitter is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent import futures
from copy import copy

from persist_lib.arguments import shown
from persist_lib.errors import Indeterminate, NotReleased, NotSent, PersistError
from persist_lib.events.program import Effect
from persist_lib.events.submitted import Submitted


def not_accepted(name: str, why: BaseException) -> PersistError:
    """The error of `submit` after the loop has stopped by itself."""
    text = f"{name}: the loop has stopped, so this event was not accepted: {said(why)}"
    return caused(NotSent(text, earlier=said(why)), why)


def inherited(name: str, event_id: int | None = None) -> PersistError:
    """The error in a forked child."""
    if event_id is None:
        return NotSent(f"{name}: this loop belongs to the parent of this process, which goes on with it", earlier="")
    return Indeterminate(
        f"{name}: event {event_id} was accepted before the process was forked. The parent goes on with it, and there "
        "its future says how it ends",
        event_id=event_id,
    )  # fmt: skip


def release_failed(name: str, effect: Effect, error: BaseException) -> PersistError:
    """The error of the event of which an effect could not be released."""
    return caused(
        NotReleased(
            f"{name}: event {effect.event_id} is in the log, and its effect number {effect.number} could not be "
            f"released: {said(error)}. Nothing after it was released. It may have arrived; the next start releases it "
            "again. If it never can be, say so: `persist events mark`",
            event_id=effect.event_id, number=effect.number,
        ),
        error,
    )  # fmt: skip


def tell_all(
    name: str, left: Sequence[Submitted], failing: BaseException | None, failed: Callable[[], PersistError] | None,
    seconds: float,
) -> PersistError | None:  # fmt: skip
    """Tell the submitters of all events that were under way what is certain.

    Returns what is told of the first one; without any, why the loop has failed, and None if it has not. Waits for what
    the store has been given, at most so many seconds: only the store knows what is in the log.
    """
    futures.wait([submitted.persisting for submitted in left if submitted.persisting is not None], seconds)
    if not left:
        return failing if isinstance(failing, PersistError) else None
    why = left[0].failure or failing or RuntimeError("the program has ended")
    first: PersistError | None = None
    for submitted in left:
        error = failed() if failed and first is None else _outcome(name, submitted, why)
        first = first or error
        submitted.future.set_exception(_again(error))
    return first


def _outcome(name: str, submitted: Submitted, why: BaseException) -> PersistError:
    id_, answer = submitted.id, submitted.persisting
    if not submitted.persisting_submitted:
        text = f"{name}: event {id_} was accepted and not written, as the loop has stopped: {said(why)}"
        return caused(NotSent(text, earlier=said(why), event_id=id_), why)
    if (answer is None and submitted.failure is None) or (answer is not None and not answer.done()):
        return Indeterminate(
            f"{name}: the store has not answered whether event {id_} is durable, and the loop has stopped: "
            f"{said(why)}. The next start finds out",
            event_id=id_,
        )
    error = submitted.failure if answer is None else answer.exception()
    if error is None:
        own = submitted.failure
        reason = f"step raised on it: {said(own)}" if own else f"the loop has stopped before: {said(why)}"
        mend = ". Mend the program so that it refuses such an event by an effect" if own else ""
        text = f"{name}: event {id_} is in the log, and its effects are not released, as {reason}{mend}. "
        return caused(NotReleased(f"{text}The next start computes and releases it", event_id=id_), own or why)
    if isinstance(error, PersistError):
        return error
    text = f"{name}: event {id_} may be in the log or not, as writing it failed: {said(error)}. "
    return caused(Indeterminate(f"{text}The next start finds out", event_id=id_), error)


def _again(error: PersistError) -> PersistError:
    """A copy for one more thread that raises it: each raise adds to an exception's traceback."""
    again = copy(error)
    again.__cause__ = error.__cause__
    return again


def said(error: BaseException) -> str:
    """An error as a part of a sentence."""
    return str(error) if isinstance(error, PersistError) else shown(error)


def caused(error: PersistError, cause: BaseException) -> PersistError:
    """The error with its cause."""
    error.__cause__ = cause
    return error
