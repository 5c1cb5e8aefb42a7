"""The streams of clients that follow shards: one of each client, in the event loop, without a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc

from persist_lib.errors import InvalidUsage, NewerFormat, NotAuthenticated
from persist_lib.format.push_messages import decode_follow, encode_pushed
from persist_lib.server.access import Caller
from persist_lib.server.pushing import Pushing, Subscriber

BEAT_S = 1.0
"""A client that was told nothing for so long is told that the server is there."""
SLOWEST_S = 60.0
"""A client that takes no message for so long is told nothing more: it has to follow anew."""


class Following:
    """Serves `follow`. `caller` tells who makes a call, by what is known now, and raises NotAuthenticated."""

    def __init__(self, pushing: Pushing, caller: Callable[[Any], Caller]) -> None:
        self._pushing, self._caller = pushing, caller

    async def serve(self, _said: Any, context: Any) -> None:
        """One stream, from its begin to its end."""
        try:
            self._caller(context)  # before anything of a stranger is read
        except NotAuthenticated as stranger:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, stranger.message)
        subscriber = Subscriber()
        self._pushing.join(subscriber)
        listening = asyncio.ensure_future(self._listen(subscriber, context))
        try:
            while not (self._pushing.is_stopping or listening.done()):
                await self._tell(subscriber, context)
            if listening.done() and (error := listening.exception()) is not None:
                raise error
        except NotAuthenticated as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)
        except (InvalidUsage, NewerFormat) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the client takes no messages")
        finally:
            listening.cancel()
            self._pushing.leave(subscriber)

    async def _listen(self, subscriber: Subscriber, context: Any) -> None:
        """Take what the client says, to its end."""
        try:
            while (data := await context.read()) is not grpc.aio.EOF:
                said = decode_follow(data)
                self._pushing.unfollow(subscriber, said.ended)
                self._pushing.follow(subscriber, said.begun)
        finally:
            subscriber.news.set()

    async def _tell(self, subscriber: Subscriber, context: Any) -> None:
        """Send the next message: what is new, or after a while that nothing is."""
        with suppress(TimeoutError):
            await asyncio.wait_for(subscriber.news.wait(), BEAT_S)
        subscriber.news.clear()
        # SUBTLE: by the rights of this moment, which may be others than when the shard was asked for.
        caller = self._caller(context)
        news = []
        for one in subscriber.backlog.take():
            if caller.rights_on(one.shard):
                news.append(one)
            else:
                self._pushing.unfollow(subscriber, (one.shard,))
                subscriber.ended.append(one.shard)
        ended, subscriber.ended = tuple(subscriber.ended), []
        await asyncio.wait_for(context.write(encode_pushed(tuple(news), ended)), SLOWEST_S)
