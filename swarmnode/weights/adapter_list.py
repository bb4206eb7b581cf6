"""List of the adapters that members share: signed records in the DHT, where each owner's nodes keep their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from swarmnode.errors import LocalError
from swarmnode.membership.access_control import load_home_key
from swarmnode.net.identity import verify
from swarmnode.peer.host import Host
from swarmnode.swarm.peers.record_validation import LISTED_S, adapter_subkey, adapters_in, adapters_key
from swarmnode.swarm.records.adapter_record import AdapterRecord, sign_adapter
from swarmnode.swarm.storage.own_adapters import OwnAdapter

TABLE_TIMEOUT_S = 10.0


class SharedAdapter(NamedTuple):
    """Record of an adapter that its owner shares, and its signed bytes."""

    record: AdapterRecord
    raw: bytes


async def shared_adapters(host: Host) -> list[SharedAdapter]:
    """Return the adapters that members share, by name. Raises NetworkDown; LocalError if the DHT does not answer."""
    key = adapters_key(host.swarm.id)
    try:
        found = await asyncio.wait_for(host.network.dht.get([key]), TABLE_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise LocalError("the swarm's list of adapters cannot be read at the moment; try again") from None
    records = adapters_in(found.get(key, {}).values(), host.swarm.id, verify, host.clock.unix())
    return sorted((SharedAdapter(*one) for one in records), key=lambda one: (one.record.name, one.record.id))


async def list_adapters(host: Host, shared: Sequence[OwnAdapter]) -> None:
    """Sign a record of each adapter with the key of the home folder, and store the records in the DHT.

    Raises NetworkDown; LocalError if the DHT does not answer, or the key cannot be read.
    """
    if not shared:
        return
    key, now = await asyncio.to_thread(load_home_key, host.config.home), host.clock.unix()
    for own in shared:
        record = own.record(host.swarm.id, key.peer_id, now)
        expires_at = min(record.expires_at, now + LISTED_S)
        if expires_at <= now:
            continue
        key_of_list, subkey, raw = adapters_key(record.swarm), adapter_subkey(record), sign_adapter(record, key.sign)
        storing = host.network.dht.store(key_of_list, subkey, raw, expires_at=expires_at)
        try:
            await asyncio.wait_for(storing, TABLE_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise LocalError("the adapter cannot be listed in the swarm at the moment; try again") from None
