"""The bytes of remembered looks: the same for ever in one version, and not used when a single bit is off."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from persist_lib.core.plan.look import Look
from persist_lib.format.frame import HEADER_BYTES
from persist_lib.format.survey_cache import MEMORY_FORM, PREFIX, Memory, decode_memory, memory_key, memory_ms
from persist_lib.ids import NAME, SeqNo
from persist_lib.location.contract import check_key, check_prefix
from tests.framing import framed

LOOK = Look(
    SeqNo(7), 1_700_000_000_000, ("compaction", "garbage"), 12, "5.3", 1_700_000_000_500, {"scrub": (SeqNo(6), 5)}
)
MEMORY = Memory("1 0.5", {"orders": LOOK, "payments": Look(SeqNo(1), 2)}, {"lost": (3, "Corrupt: it is damaged")})
BEFORE = (
    "5053546c017dcbbc3e271266e99d802e0dcf65853793a53120302e3582a66f72646572739707cf0000018bcfe5680092aa636f6d"
    "70616374696f6ea7676172626167650ca3352e33cf0000018bcfe569f481a57363727562920605a87061796d656e747397010290"
    "00a0008081a46c6f73749203b6436f72727570743a2069742069732064616d61676564"
)
EARLIER = (
    "5053546c0159c831205ae28e9cd64f6f4c74a751cc93a53120302e3582a66f72646572739807cf0000018bcfe5680092aa636f6d"
    "70616374696f6ea7676172626167650ca3352e33cf0000018bcfe569f481a573637275629206059a000000000000a0000000a870"
    "61796d656e74739801029000a000809a000000000000a000000081a46c6f73749203b6436f72727570743a206974206973206461"
    "6d61676564"
)
FORMER = (
    "5053546c01fbb2b83032b3ac1507a09c4908dab4dd93a53120302e3582a66f72646572739807cf0000018bcfe5680092aa636f6d"
    "70616374696f6ea7676172626167650ca3352e33cf0000018bcfe569f481a573637275629206059c000000000000a000000000a0"
    "a87061796d656e74739801029000a000809c000000000000a000000000a081a46c6f73749203b6436f72727570743a2069742069"
    "732064616d61676564"
)
GOLDEN = (
    "5053546c01d7722c7ca4730a9eab4023db68321c1c93a53120302e3582a66f72646572739807cf0000018bcfe5680092aa636f6d"
    "70616374696f6ea7676172626167650ca3352e33cf0000018bcfe569f481a57363727562920605dc0010000000000000a0000000"
    "00a0000000c0a87061796d656e74739801029000a00080dc0010000000000000a000000000a0000000c081a46c6f73749203b643"
    "6f72727570743a2069742069732064616d61676564"
)


def test_what_was_written_once_still_decodes_and_is_written_again() -> None:
    assert MEMORY_FORM.encode(MEMORY).hex() == GOLDEN
    assert decode_memory(bytes.fromhex(GOLDEN)) == MEMORY
    for older in (BEFORE, EARLIER, FORMER):
        assert decode_memory(bytes.fromhex(older)) == MEMORY, "without the signs that were added"


def test_every_bit_that_is_off_is_seen() -> None:
    data = MEMORY_FORM.encode(MEMORY)
    for at in range(len(data)):
        for bit in (1, 128):
            assert decode_memory(data[:at] + bytes((data[at] ^ bit,)) + data[at + 1 :]) is None
    for length in range(len(data)):
        assert decode_memory(data[:length]) is None
    assert decode_memory(data + b"\0") is None


@pytest.mark.parametrize(
    "body", [5, [], ["x", 5, {}], ["x", {"s": 5}, {}], ["x", {"s": ["a", 1]}, {}], ["x", {5: []}, {}]]
)
def test_what_has_another_form_is_not_used(body: object) -> None:
    data = framed(MEMORY_FORM.encode(MEMORY)[:4], MEMORY_FORM.encode(MEMORY)[4], msgspec.msgpack.encode(body))
    assert decode_memory(data) in (None, Memory())


def test_noise_is_not_used() -> None:
    random = Random(3)
    for _ in range(300):
        assert decode_memory(random.randbytes(random.randrange(2 * HEADER_BYTES))) is None


def test_keys_are_in_the_order_of_time_and_no_shards() -> None:
    keys = [memory_key(now, 2**64 - 1 - now) for now in (0, 9, 10, 10**13, 10**19)]
    assert keys == sorted(keys)
    assert [memory_ms(key) for key in keys] == [0, 9, 10, 10**13, 10**19]
    assert all(check_key(key) and key.startswith(check_prefix(PREFIX)) for key in keys)
    assert not NAME.fullmatch(PREFIX.rstrip("/"))
    for other in (PREFIX, f"{PREFIX}x", f"{keys[0]}x", f"orders/{keys[0]}", "-survey/1-1"):
        assert memory_ms(other) is None
