// A curve small enough to read at a glance: an area under a line, what it is now, and the ends of its axes.

import { h, s } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 56;

/** A figure with its history: `points` are numbers, the oldest first; `fromZero` lets the axis begin there. */
export function chart(title, now, points, { fromZero = true, span = "the last hour" } = {}) {
  const low = fromZero ? 0 : Math.min(...points);
  const high = Math.max(...points, low + 1e-9);
  const x = (index) => (points.length < 2 ? WIDTH : (index * WIDTH) / (points.length - 1));
  const y = (value) => HEIGHT - 3 - ((value - low) / (high - low)) * (HEIGHT - 6);
  const line = points.map((value, index) => `${index ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const picture = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title} over ${span}: now ${now}` });
  if (points.length > 1) {
    picture.append(s("path", { class: "area", d: `${line}L${WIDTH} ${HEIGHT}L0 ${HEIGHT}Z` }), s("path", { class: "line", d: line }));
  }
  return h("figure", { class: "chart" }, h("figcaption", {}, h("span", {}, title), h("strong", {}, now)), picture);
}

/** A figure without one. */
export const figure = (title, now, note = "") =>
  h("figure", { class: "chart" }, h("figcaption", {}, h("span", {}, title), h("strong", {}, now)), h("p", { class: "fine" }, note));
