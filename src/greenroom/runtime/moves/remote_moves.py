"""Moves of remote models: a load reads the account's key and the certificates, an unload closes the connections.

Owns the way from a provider in the configuration to a live slot. Connects to nothing: a provider that is down fails
the requests that ask it, and a slot stays ready. Never decides what moves: the scheduler did.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping

import greenroom
from greenroom.config.remote_key import read_remote_key
from greenroom.config.schema import Remote
from greenroom.core.model import Move, SlotId
from greenroom.errors import LoadFailed
from greenroom.http.remote import RemoteEndpoint, RemoteLimits, RemotePool
from greenroom.runtime.catalogue import Entry
from greenroom.runtime.detached import run_detached
from greenroom.runtime.remote.spending import Spending
from greenroom.runtime.slots import LiveSlot, LiveSlots


class RemoteMoves:
    """`remotes` are the providers as they are configured now."""

    def __init__(self, slots: LiveSlots, remotes: Callable[[], Mapping[str, Remote]], spending: Spending) -> None:
        self._slots = slots
        self._spending = spending
        self._remotes = remotes

    def has(self, slot: SlotId) -> bool:
        live = self._slots.live.get(slot)
        return live is not None and live.remote is not None

    async def load(self, move: Move, entry: Entry) -> None:
        """Make the slot of a remote model. Raises LoadFailed if its key or its certificates cannot be read."""
        name = entry.config.remote or ""
        remote = self._remotes().get(name)
        if remote is None:
            raise LoadFailed(f"{entry.id} could not be made ready: there is no {name} in remotes.")
        try:
            endpoint = await run_detached(lambda: endpoint_of(remote), f"key of {name}")
        except (OSError, ValueError) as error:
            raise LoadFailed(
                f"{entry.id} could not be made ready: {error}.",
                public=f"{entry.id} could not be made ready: its provider is not set up.",
            ) from error
        limits = RemoteLimits(remote.connect_timeout_s, remote.first_byte_timeout_s, remote.retries_max)
        pool = RemotePool(endpoint, limits, name=f"The remote model {entry.id}")
        now = asyncio.get_running_loop().time()
        meter = self._spending.meter(name, remote, entry.config.use_model_name or entry.id)
        self._slots.live[move.slot] = LiveSlot(move.slot, entry, None, pool, None, now, None, endpoint, meter)

    def unload(self, move: Move) -> None:
        live = self._slots.live.pop(move.slot)
        live.pool.close()


def endpoint_of(remote: Remote) -> RemoteEndpoint:
    """How this provider is called. Reads the key and the certificates. Raises OSError or ValueError."""
    key, address = read_remote_key(remote), remote.address
    tls = None
    if address.scheme == "https":
        try:
            # Checks the certificate and the name of the host.
            tls = ssl.create_default_context(cafile=remote.ca_file)
        except OSError as error:
            raise ValueError(f"the certificates in {remote.ca_file} cannot be read: {_words(error)}") from error
    return RemoteEndpoint(
        host=address.hostname or "",
        port=address.port or (443 if tls is not None else 80),
        path=address.path.rstrip("/").encode(),
        tls=tls,
        key=key,
        agent=f"greenroom/{greenroom.__version__}",
    )


def _words(error: OSError) -> str:
    return "they are no PEM" if isinstance(error, ssl.SSLError) else error.strerror or str(error)
