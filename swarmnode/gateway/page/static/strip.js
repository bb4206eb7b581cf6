// The model as a strip of its units: above how many machines hold each, below every machine's span, in as many lanes as it takes.

import { fill, h, refill, styled } from "./dom.js";
import { byId, hue, nameOf, plural, runs, units } from "./format.js";
import { KeptElements } from "./kept-elements.js";

const CELLS = 128; // at most; several units share one in larger models
const LANES = 8;

/** How many ready machines hold each unit. */
export function holders(swarm) {
  const counts = new Array(swarm.units).fill(0);
  for (const peer of swarm.peers.values()) {
    if (peer.state !== "ready") continue;
    for (let unit = peer.span[0]; unit < Math.min(peer.span[1], swarm.units); unit += 1) counts[unit] += 1;
  }
  return counts;
}

/** What the counts say, in words. */
export function coverageText(swarm, counts) {
  const missing = runs(counts.flatMap((count, unit) => (count ? [] : [unit])));
  if (missing.length) return `Nobody holds ${missing.map(units).join(", ")}.`;
  const least = Math.min(...counts);
  return `Every one of ${swarm.units} units is held by ${plural(least, "machine")} or more.`;
}

/** The counts as cells in a row. */
export function coverage(element, swarm, counts) {
  const size = Math.ceil(swarm.units / CELLS);
  const cells = [];
  for (let unit = 0; unit < swarm.units; unit += size) cells.push(Math.min(4, ...counts.slice(unit, unit + size)));
  const text = coverageText(swarm, counts);
  if (element.ariaLabel !== text) Object.assign(element, { role: "img", ariaLabel: text });
  if (element.childElementCount !== cells.length) fill(element, cells.map(() => h("i")));
  cells.forEach((count, index) => {
    const { dataset } = element.children[index];
    if (dataset.holders !== String(count)) dataset.holders = count;
  });
}

/** The whole strip. */
export class Strip {
  constructor(element) {
    this.cells = h("div", { class: "coverage tall" });
    this.lanes = h("div", { class: "lanes", "aria-hidden": "true" });
    this.note = h("p", { class: "fine" });
    this.bars = new KeptElements(this.lanes, { make: () => h("span"), show: showBar, idOf: ({ peer }) => peer.peer });
    fill(element, this.cells, this.lanes, this.note);
  }

  show(swarm, counts) {
    const writing = new Set(swarm.sessions.flatMap((session) => session.route.map((hop) => hop.peer)));
    coverage(this.cells, swarm, counts);
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
    bar.title = `${nameOf(peer)}: ${units(span)}, ${state}`;
    styled(bar, { "--hue": hue(peer.peer), "--from": span[0] + 1, "--to": span[1] + 1, "--lane": lane + 1 });
    return nameOf(peer);
  });
}

/** Spans in rows in which none overlaps another, the first row that has room taking the next; and how many found room in none. */
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
