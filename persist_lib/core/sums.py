"""What updates add up to: how many there are, the sum of their diffs, and their fingerprint.

    total([sums of one part, sums of another]) == sums of both

A batch carries these numbers, and no compaction may change them, except that the count may fall.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

MODULUS = 2**64
"""Diff sums and fingerprints are added modulo this."""


class Sums(msgspec.Struct, frozen=True, array_like=True):
    """The sums over some updates. `diff_sum` is in [-2**63, 2**63), `fingerprint` in [0, 2**64)."""

    count: int = 0
    diff_sum: int = 0
    fingerprint: int = 0

    def is_in_range(self) -> bool:
        return -(2**63) <= self.diff_sum < 2**63 and 0 <= self.fingerprint < MODULUS

    def differences(self, said: Sums) -> str:
        """How these sums differ from those that the state has (`said`), as a sentence; empty if they are the same."""
        pairs = [(name, getattr(self, name), getattr(said, name)) for name in self.__struct_fields__]
        return "; ".join(
            f"{name} is {actual}, the state says {expected}" for name, actual, expected in pairs if actual != expected
        )


def total(sums: Iterable[Sums]) -> Sums:
    """The sums over all updates together."""
    count = diff_sum = fingerprint = 0
    for one in sums:
        count += one.count
        diff_sum += one.diff_sum
        fingerprint += one.fingerprint
    return Sums(count, wrap_signed(diff_sum), fingerprint % MODULUS)


def wrap_signed(number: int) -> int:
    """A number modulo 2**64, as a signed 64-bit integer."""
    return (number + MODULUS // 2) % MODULUS - MODULUS // 2
