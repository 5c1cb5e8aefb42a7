"""What a reader was given beyond the merged upper: it is definite only if the writers agree, so it is checked later."""

from __future__ import annotations

from persist_lib.errors import Diverged
from persist_lib.pending_area.comparing import NONE, TimeSums, added
from persist_lib.schema.schema import Schema


class Emitted:
    """The sums by time over `[lower, upper)` of what was read from the pending area and is not checked yet.

    What is read twice is compared at once, what was absorbed since with the shard.
    """

    def __init__(self, shard: str, schema: Schema) -> None:
        self._shard, self._schema = shard, schema
        self.lower = self.upper = 0
        self._sums = NONE
        self._from: tuple[tuple[int, int, str], ...] = ()

    def copy(self) -> Emitted:
        """The same for another reader."""
        made = Emitted(self._shard, self._schema)
        made.lower, made.upper, made._sums, made._from = self.lower, self.upper, self._sums, self._from
        return made

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to check."""
        return self.lower >= self.upper

    def add(self, lower: int, upper: int, sums: TimeSums, key: str) -> None:
        """Note that the updates with times in `[lower, upper)` were given, as the batch with this key has them.

        Raises Diverged if other updates were given for one of these times before.
        """
        if self.is_empty or lower > self.upper:
            self.lower = self.upper = lower
            self._sums, self._from = NONE, ()
        both = max(lower, self.lower), min(upper, self.upper)
        if both[0] < both[1]:
            self._compare(self._sums.between(*both), sums.between(*both), f"the pending batch {key} has")
        if upper > self.upper:
            self._sums = added([self._sums, sums.between(max(lower, self.upper), upper)])
            self._from = (*self._from, (self.upper, upper, key))
            self.upper = upper

    def check(self, upper: int, ours: TimeSums) -> None:
        """Compare what was given before `upper` with the sums of the shard over `[lower, upper)`, and forget it.

        Raises Diverged if they are not the same.
        """
        self._compare(self._sums.between(self.lower, upper), ours, "the shard has")
        self.forget(upper)

    def forget(self, upper: int) -> None:
        """Forget what was given before `upper`."""
        self.lower = min(upper, self.upper)
        self._sums = self._sums.between(self.lower, self.upper)
        self._from = tuple(one for one in self._from if one[1] > self.lower)

    def _compare(self, given: TimeSums, other: TimeSums, who: str) -> None:
        if (time := given.first_difference(other)) is None:
            return
        keys = [key for lower, upper, key in self._from if lower <= time < upper]
        raise Diverged(
            f"collection {self._shard}: at {self._schema.show(time)}, {who} other updates than this reader was given "
            f"from {' and '.join(keys) or 'another batch'}: the writers disagree. Drop what was read from that time "
            "on, and read again with merged_only=True, or once it is known who is right: `persist pending show`",
            collection=self._shard, shard=self._shard, time=time, keys=tuple(keys),
        )  # fmt: skip
