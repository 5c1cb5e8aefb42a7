"""Short words for rows of a Consensus."""

from __future__ import annotations

from persist_lib.ids import SeqNo
from persist_lib.location.api import Newest


def after(seqno: int) -> Newest | None:
    """To follow whatever row is at `seqno`; after 0, to be the first of all."""
    return Newest(SeqNo(seqno)) if seqno else None
