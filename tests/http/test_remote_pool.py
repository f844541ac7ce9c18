"""Connections to a provider: what was delivered to it is paid for, and is not sent a second time."""

from __future__ import annotations

import pytest

from greenroom.errors import RemoteFailed
from greenroom.http.remote import RemoteEndpoint, RemoteLimits, RemotePool

from .conftest import Engines
from .test_upstream import OK, ask
from .wires import Call, OddLoop


class StillLoop(OddLoop):
    """The running loop, with a clock that stands still until it is set."""

    def time(self) -> float:
        return self.ahead_s


@pytest.mark.parametrize("worked_s", [0.0, 1.0])
async def test_a_reused_connection_is_replaced_only_if_it_ended_at_once(engines: Engines, worked_s: float) -> None:
    async def script(call: Call) -> None:
        if sum(1 for other in engine.calls if other.connection == call.connection) == 2:
            loop.ahead_s += worked_s
            call.writer.transport.abort()
            return
        await call.say(OK)

    engine, loop = await engines(script), StillLoop()
    loop.let.set()
    endpoint = RemoteEndpoint("127.0.0.1", engine.port, b"", None, None)
    pool = RemotePool(endpoint, RemoteLimits(retries_max=0), name="The model", loop=loop)  # type: ignore[arg-type]
    try:
        assert (await ask(pool)).data == b"ok"
        notes = await ask(pool)
        if worked_s:
            assert (notes.told, notes.before_first_byte) == (["lost"], False) and isinstance(notes.error, RemoteFailed)
            assert (len(engine.calls), engine.connections, pool.retries) == (2, 1, 0)
        else:
            assert notes.told[-1] == "complete" and (len(engine.calls), engine.connections, pool.retries) == (3, 2, 1)
    finally:
        pool.close()
