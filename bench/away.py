"""A server that is as far away as those of a data centre: a relay, in a process of its own, passes bytes on late.

With the store on the same machine, a compare-and-set takes some 0.3 ms, nearly all of it work of the processors. Where
it has to cross a network, and a database that copies each commit to another machine, it takes milliseconds of waiting.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from bench.peer import Ready

CHUNK = 1 << 16


@contextmanager
def relay(port: str, ms: str) -> Iterator[Ready]:
    """A port that leads to `port` of this machine. What goes either way arrives `ms` ms late, and in order."""
    loop, target, late_s = asyncio.new_event_loop(), int(port), float(ms) / 1000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(_pass(reader, there_writer, late_s), _pass(there_reader, writer, late_s))

    async def start() -> int:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        found: int = server.sockets[0].getsockname()[1]
        return found

    threading.Thread(target=loop.run_forever, daemon=True).start()
    here = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield Ready("", {"port": lambda: here})


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, late_s: float) -> None:
    """Hand on what comes, each piece as late as the others, to the end."""
    loop, waiting = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

    async def take() -> None:
        data = b"."
        while data:
            data = await reader.read(CHUNK)
            waiting.put_nowait((loop.time() + late_s, data))

    taking = asyncio.create_task(take())
    with suppress(ConnectionError):
        while True:
            due, data = await waiting.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                break
            writer.write(data)
            await writer.drain()
    writer.close()
    await taking
