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

  /** Number of ready machines that hold each unit. */
  get holders() {
    this.counts ??= countHolders(this);
    return this.counts;
  }
}

function countHolders({ units, peers }) {
  const counts = new Array(units).fill(0);
  for (const { state, span } of peers.values()) {
    if (state !== "ready") continue;
    for (let unit = span[0]; unit < Math.min(span[1], units); unit += 1) counts[unit] += 1;
  }
  return counts;
}
