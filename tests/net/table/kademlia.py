"""Many peers of a table in one process: what each knows and keeps, and strangers among them that lie."""

from __future__ import annotations

import random
from collections.abc import Sequence

from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.interfaces import PeerId
from swarmnode.net.kademlia import BUCKET_PEERS, EnoughThere, KeyAnswer, Lookup, RecordStore, RoutingTable, node_id

NOW = 1_790_000_000.0
LATER = NOW + 60


class TablePeer:
    """One honest peer."""

    def __init__(self, name: PeerId, group: str) -> None:
        self.name = name
        self.group = group
        self.routing_table = RoutingTable(name)
        self.store = RecordStore(lambda: NOW)

    def answer(self, key: int) -> KeyAnswer:
        return KeyAnswer(self.store.get(key), self.routing_table.nearest(key))


class Liar(TablePeer):
    """Names its friends alone, and has nothing."""

    friends: Sequence[PeerId] = ()

    def answer(self, key: int) -> KeyAnswer:
        nearest = sorted(self.friends, key=lambda peer: node_id(peer) ^ key)
        return KeyAnswer({}, nearest[:BUCKET_PEERS])


class Kademlia:
    """Peers of address groups of their own, each of which knows some of every distance."""

    def __init__(self, peers: int, seed: int = 1) -> None:
        self.random = random.Random(seed)
        self.peers: dict[PeerId, TablePeer] = {}
        self.calls = 0
        for number in range(peers):
            self.add(TablePeer(f"honest {seed} {number}", f"198.51.{number}.0/24"))
        names = list(self.peers)
        for peer in self.peers.values():
            for other in self.random.sample(names, len(names)):
                if other != peer.name:
                    peer.routing_table.record_contact(other, self.group_of(other))

    def add(self, peer: TablePeer) -> None:
        self.peers[peer.name] = peer

    def group_of(self, peer: PeerId) -> str:
        known = self.peers.get(peer)
        return peer if known is None else known.group

    async def ask(self, peer: PeerId, keys: Sequence[int]) -> list[KeyAnswer] | None:
        self.calls += 1
        known = self.peers.get(peer)
        return None if known is None else [known.answer(key) for key in keys]

    async def look_up(self, asker: TablePeer, *keys: int, enough: EnoughThere | None = None) -> Lookup:
        kept = {key: asker.store.get(key) for key in keys}
        return await Lookup(asker.name, kept, asker.routing_table.nearest, self.ask, self.group_of, enough=enough).run()

    async def store(self, writer: TablePeer, key: int, count: int = 5) -> list[PeerId]:
        """Store a record of the writer at the keepers of a key; who they are."""
        keepers = (await self.look_up(writer, key)).nearest(key, count)
        for keeper in keepers:
            store, subkey = self.peers[keeper].store, writer.name.encode()
            store.store(key, subkey, b"value", LATER, Claimant(writer.group, writer.name))
        return keepers

    def invade(self, key: int, count: int, group: str = "203.0.113.0/24") -> list[Liar]:
        """A stranger's peers from one address group, nearer to a key than all others; whoever could know them, does."""
        nearest = min(node_id(peer) ^ key for peer in self.peers)
        liars: list[Liar] = []
        number = 0
        while len(liars) < count:
            number += 1
            if node_id(name := f"liar {number}") ^ key < nearest:
                liars.append(Liar(name, group))
        for liar in liars:
            liar.friends = [other.name for other in liars]
            self.add(liar)
        for peer in list(self.peers.values()):
            for liar in liars:
                peer.routing_table.record_contact(liar.name, group)
        return liars
