// A small curve: an area under a line, with its present value.

import { fill, h, s } from "./dom.js";
import { KeptElements } from "./kept-elements.js";

const WIDTH = 240;
const HEIGHT = 56;

/** Figures by their titles. Each is `{ title, now, note }`, or `{ title, now, points, fromZero }` with its history, the oldest first;
 * with `fromZero` the axis begins at 0. `above` are points of a second, dashed line. */
export class Figures {
  constructor(element) {
    this.figures = new KeptElements(element, { make: () => h("figure", { class: "chart" }), show, idOf: ({ title }) => title });
  }

  set(figures) {
    this.figures.set(figures);
  }
}

function show(element, figure, before) {
  const { title, now, note, points } = figure;
  if (now === before?.now && note === before.note && points === before.points) return;
  const caption = h("figcaption", {}, h("span", {}, title), h("strong", {}, now));
  fill(element, caption, points ? curve(figure) : h("p", { class: "fine" }, note));
}

function curve({ title, now, points, above = [], fromZero = true }) {
  const low = fromZero ? 0 : Math.min(...points);
  const high = Math.max(...points, ...above, low + 1e-9);
  const x = (index) => (points.length < 2 ? WIDTH : (index * WIDTH) / (points.length - 1));
  const y = (value) => HEIGHT - 3 - ((value - low) / (high - low)) * (HEIGHT - 6);
  const lineOf = (values) => values.map((value, index) => `${index ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const line = lineOf(points);
  const picture = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}, over the last hour: now ${now}` });
  if (points.length > 1) {
    picture.append(s("path", { class: "area", d: `${line}L${WIDTH} ${HEIGHT}L0 ${HEIGHT}Z` }), s("path", { class: "line", d: line }));
    if (above.length) picture.append(s("path", { class: "line above", d: lineOf(above) }));
  }
  return picture;
}
