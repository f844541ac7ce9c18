"""What tests of the Redis store share: a server of their own, clients that are closed, asks and looks in few words."""

from __future__ import annotations

from greenroom.leases.records import LeaseAsk
from greenroom.leases.shared.redis_store import RedisStore
from greenroom.leases.shared.stored import SlotAsk
from tests.redis_server import RedisServer
from tests.waiting import until

DEVICES = {"gpu0": 10_000, "gpu1": 10_000}
# Long enough for a holder to come back on a busy machine.
GRACE_S = 4.0


class Opener:
    """Opens clients of one host's store, and closes them all."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._clients: list[RedisStore] = []

    def __call__(
        self, *, ttl_s: float = 30.0, grace_s: float = 0.0, url: str | None = None, offers: bool = True
    ) -> RedisStore:
        offered = DEVICES if offers else {}
        self._clients.append(RedisStore(url or self._server.url, "box", ttl_s=ttl_s, grace_s=grace_s, offers=offered))
        return self._clients[-1]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


def ask(id: str, mib: int, *, wait_s: float = 0.0, priority: int = 1, preemptible: bool = False) -> LeaseAsk:
    return LeaseAsk(id, id, mib, 1, ("gpu0",), priority, preemptible, wait_s=wait_s)


def slot(id: str, mib: int, *, device: str = "gpu0") -> SlotAsk:
    return SlotAsk(id, id, {device: mib})


async def claims(store: RedisStore) -> dict[str, tuple[str, int]]:
    return {lease.id: (lease.state, sum(lease.claim.values())) for lease in await store.leases()}


async def until_claims(store: RedisStore, wanted: dict[str, tuple[str, int]]) -> None:
    async def is_so() -> bool:
        return await claims(store) == wanted

    await until(is_so, f"leases {wanted}")
