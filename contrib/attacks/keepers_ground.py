"""A stranger tries identities until thirty of them are nearer to a key than all others, to become all of its keepers."""

from __future__ import annotations

from attack import Outcome, main

from swarmnode.net.kademlia import key_id
from tests.net.table.kademlia import Kademlia

VIRTUAL, FAST = True, True
KEY = key_id(b"a swarm's peers")
PEERS, LIARS = 60, 30


async def attack() -> Outcome:
    table = Kademlia(PEERS)
    writer, *readers = table.peers.values()
    named = {liar.name for liar in table.invade(KEY, LIARS)}
    keepers = await table.store(writer, KEY)
    blinded = 0
    for reader in readers:
        blinded += writer.name.encode() not in (await table.look_up(reader, KEY)).records(KEY)
    taken = len(named & set(keepers))
    return Outcome(
        taken < len(keepers) and blinded == 0,
        f"{taken} of {len(keepers)} keepers are the stranger's; {blinded} of {len(readers)} readers see nothing",
    )


main(__name__, attack, virtual=VIRTUAL)
