// Links between machines as a matrix: rows send, columns receive. Its thousands of cells are written a few per frame.

import { fill, h, overFrames, styled } from "./dom.js";
import { nameOf, number } from "./format.js";

const SLOW_MS = 200; // the darkest shade
const SLOW_MBIT = 10;
const CAPTIONS = {
  delay: "Round trips in ms; values in italics are estimated from coordinates, not measured.",
  rate: "Bandwidths in Mbit/s.",
};
const NOTHING = { text: "", shade: 0, isMeasured: true };

export class LinkMatrix {
  constructor(element) {
    this.element = element;
    this.table = null;
  }

  /** Show round trips (`delay`) or bandwidths (`rate`). */
  show(links, swarm, kind) {
    if (links.peers.length < 2) return; // its part of the page is hidden then
    const names = links.peers.map((id) => nameOf(swarm.peers.get(id) ?? { peer: id }));
    if (names.join("\n") !== this.table?.names.join("\n")) {
      this.table = new LinkTable(names);
      fill(this.element, this.table.element);
    }
    this.table.show(links, kind);
  }
}

/** Table of links between machines with these names. Its roles are explicit because tables lose them when laid out as grids. */
class LinkTable {
  constructor(names) {
    this.names = names;
    this.cells = []; // [row][column]
    this.written = []; // the values of the cells
    this.write = overFrames(names.map((_, row) => () => this.writeRow(row)));
    this.caption = h("caption", { class: "fine" });
    this.body = h("tbody", { role: "rowgroup" });
    const heads = names.map((name) => h("th", { role: "columnheader", scope: "col" }, h("span", {}, name)));
    const head = h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, h("td", { role: "cell" }), heads));
    this.element = styled(h("table", { role: "table" }, this.caption, head, this.body), { "--columns": names.length });
  }

  show(links, kind) {
    this.valueOf = (row, column) => (kind === "delay" ? delay : bandwidth)(links, row, column);
    this.caption.textContent = CAPTIONS[kind];
    this.write();
  }

  writeRow(row) {
    if (row === this.cells.length) this.addRow(row);
    this.cells[row].forEach((cell, column) => {
      if (row === column) return;
      const value = this.valueOf(row, column);
      writeCell(cell, value, this.written[row][column]);
      this.written[row][column] = value;
    });
  }

  addRow(row) {
    this.cells.push(this.names.map((_, column) => h("td", { role: "cell", class: row === column && "self" })));
    this.written.push(this.names.map(() => NOTHING));
    this.body.append(h("tr", { role: "row" }, h("th", { role: "rowheader", scope: "row" }, this.names[row]), this.cells[row]));
  }
}

function writeCell(cell, { text, shade, isMeasured }, before) {
  if (text !== before.text) cell.textContent = text;
  if (shade !== before.shade) styled(cell, { "--shade": `${shade}%` });
  if (isMeasured !== before.isMeasured) cell.classList.toggle("inferred", !isMeasured);
}

function delay(links, row, column) {
  const value = links.rtt_s[row][column] * 1000;
  const shade = Math.log1p(value) / Math.log1p(SLOW_MS);
  return { text: number(value, value < 10 ? 1 : 0), shade: percent(shade), isMeasured: links.measured[row][column] };
}

function bandwidth(links, row, column) {
  const value = links.bandwidth_bps[row][column] / 1e6;
  return value ? { text: number(Number(value.toPrecision(2)), 1), shade: percent(SLOW_MBIT / value), isMeasured: true } : { ...NOTHING, text: "?" };
}

const percent = (share) => Math.round(Math.min(1, share) * 60);
