// The model as a strip of its units: above how many machines hold each, below every machine's span, in as many lanes as it takes.

import { fill, h, styled } from "./dom.js";
import { byId, hue, nameOf, plural, runs, units } from "./format.js";

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
export function coverage(element, swarm) {
  const counts = holders(swarm);
  const size = Math.ceil(swarm.units / CELLS);
  const cells = [];
  for (let unit = 0; unit < swarm.units; unit += size) cells.push(Math.min(...counts.slice(unit, unit + size)));
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", coverageText(swarm, counts));
  if (element.childElementCount !== cells.length) fill(element, cells.map(() => h("i")));
  cells.forEach((count, index) => {
    const shown = String(Math.min(count, 4));
    if (element.children[index].dataset.holders !== shown) element.children[index].dataset.holders = shown;
  });
}

/** The whole strip. `writing` are the ids of machines that write something now. */
export function strip(element, swarm, writing) {
  if (!element.childElementCount) element.append(h("div", { class: "coverage tall" }), h("div", { class: "lanes", "aria-hidden": "true" }), h("p", { class: "fine" }));
  const [cells, lanes, note] = element.children;
  coverage(cells, swarm);
  const { rows, hidden } = packed([...swarm.peers.values()].filter((peer) => peer.span[1] > peer.span[0]));
  styled(lanes, { "--units": swarm.units });
  fill(lanes, rows.flatMap((row, lane) => row.map((peer) => bar(peer, lane, writing))));
  note.textContent = hidden ? `${plural(hidden, "machine")} more below.` : "";
}

function bar(peer, lane, writing) {
  const classes = ["bar", peer.state, writing.has(peer.peer) && "writing"].filter(Boolean).join(" ");
  const element = h("span", { class: classes, title: `${nameOf(peer)}: ${units(peer.span)}, ${peer.state}` }, nameOf(peer));
  return styled(element, { "--hue": hue(peer.peer), "--from": peer.span[0] + 1, "--to": peer.span[1] + 1, "--lane": lane + 1 });
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
