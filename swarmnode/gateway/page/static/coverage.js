// Coverage of a swarm's model: how many machines hold each of its layers (units).

import { fill, h } from "./dom.js";
import { plural, runs, units } from "./format.js";

const CELLS = 128; // at most; in larger models several layers share a cell

/** Return the coverage as a sentence. */
export function coverageText({ units: all, holders }) {
  const missing = runs(holders.flatMap((count, unit) => (count ? [] : [unit])));
  if (missing.length) return `No machine holds ${missing.map(units).join(", ")}.`;
  const least = Math.min(...holders);
  return `Each of ${all} layers is held by ${plural(least, "machine")} or more.`;
}

/** Show the coverage as a row of cells. */
export function coverage(element, swarm) {
  const size = Math.ceil(swarm.units / CELLS);
  const cells = [];
  for (let unit = 0; unit < swarm.units; unit += size) cells.push(Math.min(4, ...swarm.holders.slice(unit, unit + size)));
  const text = coverageText(swarm);
  if (element.ariaLabel !== text) Object.assign(element, { role: "img", ariaLabel: text });
  if (element.childElementCount !== cells.length) fill(element, cells.map(() => h("i")));
  cells.forEach((count, index) => {
    const { dataset } = element.children[index];
    if (dataset.holders !== String(count)) dataset.holders = count;
  });
}
