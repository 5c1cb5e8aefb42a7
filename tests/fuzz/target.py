"""What a fuzzer gives bytes to, and the rule for whatever comes of them.

Any bytes give a value or one of the errors that are documented for them: never another exception, and nothing that
takes long or much memory. Where the decoder has an encoder, what was decoded is encoded to bytes that say the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from persist_lib.errors import PersistError

SLOW_S = 10.0
"""Longer than any input may take. A test that is run beside others has to bear some waiting."""
RSS_MB = 2048
"""The most memory of a process that fuzzes: a decoder that takes more for an input is a finding."""
LONGEST = 1 << 16
"""The longest input: what is wrong with long ones is, nearly always, wrong with short ones."""
CUT = b"\xff\xfe\xfd"
"""What stands between messages in an input that has several. It is neither UTF-8 nor in a valid seed."""
Decode = Callable[[bytes], Any]


@dataclass(frozen=True)
class Target:
    """One decoder. `seeds` are valid: each decodes. `errors` are what it may raise.

    `encode` gives bytes that `decode` reads again; None where nothing is promised.
    """

    name: str
    decode: Decode
    seeds: Callable[[], Sequence[bytes]]
    errors: tuple[type[Exception], ...] = (PersistError,)
    encode: Callable[[Any], bytes] | None = None


def check(target: Target, data: bytes) -> bool:
    """Give some bytes to a decoder: whether it made a value of them. Raises whatever breaks the rule."""
    began = time.monotonic()
    try:
        value = target.decode(data)
    except target.errors as error:
        if not str(error):
            raise AssertionError(f"{type(error).__name__} says nothing") from error
        return False
    finally:
        assert time.monotonic() - began < SLOW_S, f"{target.name} took {time.monotonic() - began:.1f} s"
    if target.encode is not None:
        encoded = target.encode(value)
        again = target.decode(encoded)
        assert again == value, "what was encoded says something else"
        assert target.encode(again) == encoded, "the same value was encoded in another way"
    return True


def mutated(seeds: Sequence[bytes], count: int, chance: Random) -> Iterator[bytes]:
    """Valid bytes, each with some changes of the kinds that fuzzers make."""
    for _ in range(count):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.choice((1, 1, 2, 4, 8))):
            chance.choice(_CHANGES)(data, chance, seeds)
        yield bytes(data[:LONGEST])


def _flip(data: bytearray, chance: Random, _: Sequence[bytes]) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _set(data: bytearray, chance: Random, _: Sequence[bytes]) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))


def _number(data: bytearray, chance: Random, _: Sequence[bytes]) -> None:
    """A length that is too long, or a number of another sign."""
    width = chance.choice((2, 4, 8))
    value = chance.choice((0, 1, (1 << 8 * width) - 1, 1 << (8 * width - 1), (1 << (8 * width - 1)) - 1))
    at = chance.randrange(len(data) + 1)
    data[at : at + width] = value.to_bytes(width, chance.choice(("big", "little")))


def _cut(data: bytearray, chance: Random, _: Sequence[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    del data[at : chance.choice((len(data), at + chance.randrange(16)))]


def _repeat(data: bytearray, chance: Random, _: Sequence[bytes]) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = data[at : at + chance.randrange(1, 16)] * chance.choice((1, 2, 1000))


def _splice(data: bytearray, chance: Random, seeds: Sequence[bytes]) -> None:
    other = chance.choice(seeds)
    at, begin = chance.randrange(len(data) + 1), chance.randrange(len(other) + 1)
    data[at : at + chance.randrange(32)] = other[begin : begin + chance.randrange(32)]


def _nest(data: bytearray, chance: Random, _: Sequence[bytes]) -> None:
    """Something within itself, deeper than any parser follows."""
    at = chance.randrange(len(data) + 1)
    data[at:at] = chance.choice((b"[", b'{"a":', b"(", b"\x91", b"\x81\xa1a")) * chance.choice((3, 3000))


_CHANGES = (_flip, _flip, _set, _set, _number, _cut, _repeat, _splice, _nest)
