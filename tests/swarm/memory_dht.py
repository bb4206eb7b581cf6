"""The smallest network that a directory can live on: one dictionary that all peers share."""

from swarmnode.errors import NetworkDown
from swarmnode.net.interfaces import Dht, Record


class MemoryDht(Dht):
    def __init__(self, clock):
        self.clock = clock
        self.records = {}
        self.down = False
        self.stores = 0
        self.keys_read = []
        self.enough = None  # of the last read

    async def store(self, key, subkey, value, *, expires_at):
        self._check()
        self.stores += 1
        known = self.records.setdefault(key, {}).get(subkey)
        if known is None or known.expires_at < expires_at:
            self.records[key][subkey] = Record(value, expires_at)
        return True

    async def get(self, keys, *, enough=None):
        self._check()
        self.keys_read.append(list(keys))
        self.enough = enough
        now = self.clock.time()
        return {
            key: {sub: record for sub, record in self.records.get(key, {}).items() if record.expires_at > now}
            for key in keys
        }

    async def population(self):
        self._check()
        return float(len({sub for records in self.records.values() for sub in records}))

    def _check(self):
        if self.down:
            raise NetworkDown("the test cut the network")


class MemoryNetwork:
    def __init__(self, dht, peer_id):
        self.dht = dht
        self.peer_id = peer_id
