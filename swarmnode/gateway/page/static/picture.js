// State of a swarm, kept up to date by its events.

export class Swarm {
  constructor() {
    this.peers = new Map(); // by id
    this.counts = null;
  }

  /** Apply an event of the swarm's stream. */
  hear(name, told) {
    const { peers = [], gone = [], ...rest } = told;
    if (name === "swarm") this.peers = new Map();
    Object.assign(this, rest);
    for (const peer of peers) this.peers.set(peer.peer, peer);
    for (const id of gone) this.peers.delete(id);
    this.counts = null;
  }

  /** Number of machines that hold each layer and are ready. */
  get holders() {
    this.counts ??= countHolders(this);
    return this.counts;
  }
}

function countHolders({ units, peers }) {
  const counts = new Array(units).fill(0);
  const last = new Array(units).fill(null); // the last machine counted for each layer
  const ready = [...peers.values()].filter(({ state }) => state === "ready");
  for (const { machine, span } of ready.sort((one, other) => (one.machine < other.machine ? -1 : Number(one.machine > other.machine)))) {
    for (let layer = span[0]; layer < Math.min(span[1], units); layer += 1) {
      if (last[layer] !== machine) counts[layer] += 1;
      last[layer] = machine;
    }
  }
  return counts;
}
