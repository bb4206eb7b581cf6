// The model as a strip of its layers: at the top the number of holders, below it every machine's span, in several lanes.

import { coverage } from "./coverage.js";
import { fill, h, refill, styled } from "./dom.js";
import { byId, hue, layers, nameOf, plural } from "./format.js";
import { KeptElements } from "./kept-elements.js";
import { readiness } from "./readiness.js";

const LANES = 8;

/** Strip of a model. */
export class Strip {
  constructor(element) {
    this.cells = h("div", { class: "coverage tall" });
    this.lanes = h("div", { class: "lanes", "aria-hidden": "true" });
    this.note = h("p", { class: "fine" });
    this.bars = new KeptElements(this.lanes, { make: () => h("span"), show: showBar, idOf: ({ peer }) => peer.peer });
    fill(element, this.cells, this.lanes, this.note);
  }

  show(swarm) {
    const writing = new Set(swarm.sessions.flatMap((session) => session.route.map((hop) => hop.peer)));
    coverage(this.cells, swarm, readiness(swarm).head);
    const { rows, hidden } = packed([...swarm.peers.values()].filter((peer) => peer.span[1] > peer.span[0]));
    refill(this.note, hidden, () => (hidden ? `${plural(hidden, "machine")} more below.` : ""));
    if (this.units !== swarm.units) styled(this.lanes, { "--units": swarm.units });
    this.units = swarm.units;
    this.bars.set(rows.flatMap((row, lane) => row.map((peer) => ({ peer, lane, isWriting: writing.has(peer.peer) }))));
  }
}

function showBar(bar, { peer, lane, isWriting }, before) {
  if (peer === before?.peer && lane === before.lane && isWriting === before.isWriting) return;
  const { span, state } = peer;
  bar.className = ["bar", state, isWriting && "writing"].filter(Boolean).join(" ");
  refill(bar, [nameOf(peer), span, state, lane], () => {
    bar.title = `${nameOf(peer)}: ${layers(span)}, ${state}`;
    styled(bar, { "--hue": hue(peer.peer), "--from": span[0] + 1, "--to": span[1] + 1, "--lane": lane + 1 });
    return nameOf(peer);
  });
}

/** Arrange spans in rows without overlaps, each in the first row with room; also return how many found no room. */
function packed(peers) {
  const rows = [];
  let hidden = 0;
  for (const peer of peers.sort((one, other) => one.span[0] - other.span[0] || byId(one, other))) {
    const row = rows.find((each) => each.at(-1).span[1] <= peer.span[0]);
    if (row) row.push(peer);
    else if (rows.length < LANES) rows.push([peer]);
    else hidden += 1;
  }
  return { rows, hidden };
}
