"""How the event loop of a server learns that requests are answered: the answers of a row with one wake-up.

The threads of the funnels answer all requests of a row one after the other. To wake the loop for each of them costs
more than to serve it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from persist_lib.location.commands import Answered
from persist_lib.server.requests import Request


class Answers:
    """Waits in one event loop. `of` is called there; answers come from any thread."""

    def __init__(self) -> None:
        self._ready: deque[asyncio.Future[None]] = deque()
        self._is_woken = False

    async def of(self, requests: Sequence[Request]) -> list[Answered]:
        """What all of the requests are answered. Raises the first of their errors."""
        loop = asyncio.get_running_loop()
        for request in requests:
            if not request.answer.done():
                told: asyncio.Future[None] = loop.create_future()
                request.answer.add_done_callback(partial(self._answered, loop, told))
                await told
        return [request.answer.result(0) for request in requests]

    def _answered(self, loop: asyncio.AbstractEventLoop, told: asyncio.Future[None], _: Any) -> None:
        self._ready.append(told)
        if not self._is_woken:
            # SUBTLE: before the call. The loop clears it before it looks, so that nothing is left behind.
            self._is_woken = True
            loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_woken = False
        while self._ready:
            told = self._ready.popleft()
            if not told.done():  # else its call was cancelled
                told.set_result(None)
