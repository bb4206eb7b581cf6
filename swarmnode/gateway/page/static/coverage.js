// Coverage of a swarm's model: how many machines hold each of its layers.

import { fill, h } from "./dom.js";

const CELLS = 128; // at most; in larger models several layers share a cell

/** Show the coverage as a row of cells, which `text` describes. */
export function coverage(element, swarm, text) {
  const size = Math.ceil(swarm.units / CELLS);
  const cells = [];
  for (let layer = 0; layer < swarm.units; layer += size) cells.push(Math.min(4, ...swarm.holders.slice(layer, layer + size)));
  if (element.ariaLabel !== text) Object.assign(element, { role: "img", ariaLabel: text });
  if (element.childElementCount !== cells.length) fill(element, cells.map(() => h("i")));
  cells.forEach((count, index) => {
    const { dataset } = element.children[index];
    if (dataset.holders !== String(count)) dataset.holders = count;
  });
}
