// The links between machines as a matrix: rows send, columns receive.

import { fill, h, styled } from "./dom.js";
import { nameOf } from "./format.js";

const SLOW_MS = 200; // as dark as it gets
const SLOW_MBIT = 10;

/** Show round trips (`delay`) or bandwidths (`rate`). */
export function showLinks(element, links, swarm, kind) {
  if (links.peers.length < 2) {
    fill(element, h("p", { class: "fine" }, "There are no links yet: fewer than two machines hold units."));
    return;
  }
  const name = (id) => nameOf(swarm.peers.get(id) ?? { peer: id });
  const cell = kind === "delay" ? delay : bandwidth;
  const head = h("tr", {}, h("td"), links.peers.map((id) => h("th", { scope: "col" }, h("span", {}, name(id)))));
  const rows = links.peers.map((id, row) =>
    h("tr", {}, h("th", { scope: "row" }, name(id)), links.peers.map((_, column) => (row === column ? h("td", { class: "self" }) : cell(links, row, column)))),
  );
  const caption = kind === "delay" ? "Round trips in ms; in italics what follows from coordinates and was not measured." : "Bandwidths in Mbit/s.";
  fill(element, h("table", {}, h("caption", { class: "fine" }, caption), h("thead", {}, head), h("tbody", {}, rows)));
}

function delay(links, row, column) {
  const value = links.rtt_s[row][column] * 1000;
  const text = value < 10 ? value.toFixed(1) : value.toFixed(0);
  return shaded(Math.log1p(value) / Math.log1p(SLOW_MS), links.measured[row][column] ? text : h("em", {}, text));
}

function bandwidth(links, row, column) {
  const value = links.bandwidth_bps[row][column] / 1e6;
  return value ? shaded(SLOW_MBIT / value, value.toPrecision(2)) : h("td", { class: "fine" }, "?");
}

const shaded = (share, ...children) => styled(h("td", {}, ...children), { "--shade": `${Math.round(Math.min(1, share) * 60)}%` });
