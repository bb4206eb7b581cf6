// How well the units of a swarm's model are held.

import { fill, h } from "./dom.js";
import { plural, runs, units } from "./format.js";

const CELLS = 128; // at most; several units share one in larger models

/** It in words. */
export function coverageText({ units: all, holders }) {
  const missing = runs(holders.flatMap((count, unit) => (count ? [] : [unit])));
  if (missing.length) return `Nobody holds ${missing.map(units).join(", ")}.`;
  const least = Math.min(...holders);
  return `Every one of ${all} units is held by ${plural(least, "machine")} or more.`;
}

/** It as cells in a row. */
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
