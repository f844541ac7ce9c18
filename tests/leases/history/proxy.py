"""A relay between one program and Redis that can lose its connections, pass on late what it gets, or nothing."""

from __future__ import annotations

import asyncio
import contextlib


class Proxy:
    def __init__(self, redis_port: int) -> None:
        self.redis_port = redis_port
        self._server: asyncio.Server | None = None
        self._relays: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.refuses = False
        # Everything arrives so much later, each way.
        self.delay_s = 0.0

    @property
    def port(self) -> int:
        assert self._server is not None, "not started"
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    def cut(self) -> None:
        """Lose every connection, with whatever is on its way."""
        for relay in tuple(self._relays):
            relay.cancel()

    def stall(self) -> None:
        """Keep connections, and what is sent, but deliver nothing until `flow`."""
        self._open.clear()

    def flow(self) -> None:
        self.refuses, self.delay_s = False, 0.0
        self._open.set()

    async def close(self) -> None:
        assert self._server is not None, "not started"
        self._server.close()
        self.cut()
        await asyncio.gather(*self._relays, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        try:
            if not self.refuses:
                await self._relay(reader, writer)
        except (OSError, asyncio.CancelledError):
            # Cut by us, or one side is gone: either way the other side learns it by the close below.
            pass
        finally:
            self._relays.discard(task)
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.redis_port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, back))
                group.create_task(self._copy(there, writer))
        except* OSError:
            pass
        finally:
            back.close()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while chunk := await source.read(65_536):
            await self._open.wait()
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            target.write(chunk)
            await target.drain()
        with contextlib.suppress(OSError):
            target.write_eof()
