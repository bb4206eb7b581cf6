// Cards of one size in as many columns as fit. Only visible ones exist: a thousand machines cost as much as a screenful. The grid has no
// scroll bar of its own: it scrolls with the page, and shows few cards until the reader asks for all.

import { SLICE_MS, everyFrame, h, keepFocus, styled } from "./dom.js";
import { number } from "./format.js";
import { KeptElements } from "./kept-elements.js";

const SPARE_ROWS = 2;
const FEW = 12; // cards, before all are asked for

export class VirtualGrid {
  /** `make()` returns an empty card, `show(card, item)` fills it; sizes are in pixels, `idOf(item)` is an item's constant id. */
  constructor(element, { make, show, idOf, width, height, label }) {
    Object.assign(this, { show, width, height });
    this.items = [];
    this.showsAll = false;
    this.sheet = h("div", { class: "sheet", role: "list", "aria-label": label });
    this.more = h("button", { type: "button", class: "second more", hidden: true, onclick: () => this.toggle() });
    this.cards = new KeptElements(this.sheet, {
      make: () => listItem(make()),
      show: (card, place, before) => this.showPlace(card, place, before),
      idOf: (place) => idOf(place.item),
    });
    element.append(this.sheet, this.more);
    this.draw = everyFrame(() => this.drawNow());
    addEventListener("scroll", this.draw, { passive: true });
    addEventListener("resize", this.draw);
    new ResizeObserver(this.draw).observe(this.sheet);
  }

  /** Show these items, in this order. */
  set(items) {
    this.items = items;
    this.draw();
  }

  toggle() {
    this.showsAll = !this.showsAll;
    if (!this.showsAll) this.sheet.scrollIntoView({ block: "nearest" });
    this.draw();
  }

  drawNow() {
    const { top } = this.sheet.getBoundingClientRect(); // read everything before writing anything, so that the browser lays out once
    const columns = Math.max(1, Math.floor(this.sheet.clientWidth / this.width));
    const all = this.items.length;
    const count = this.showsAll ? all : Math.min(FEW, all);
    const rows = Math.ceil(count / columns);
    const begin = Math.min(rows - 1, Math.floor(-top / this.height)) - SPARE_ROWS;
    const first = Math.max(0, begin) * columns;
    const last = Math.min(count, first + (Math.ceil(innerHeight / this.height) + 2 * SPARE_ROWS) * columns);
    if (rows !== this.rows) {
      this.rows = rows;
      styled(this.sheet, { height: `${rows * this.height}px` });
    }
    this.more.hidden = all <= FEW;
    const label = this.showsAll ? "Show fewer" : `Show all ${number(all)}`;
    if (this.more.textContent !== label) this.more.textContent = label;
    const places = this.items.slice(first, last).map((item, offset) => ({ item, index: first + offset, columns, count: all }));
    if (!this.cards.set(places, performance.now() + SLICE_MS)) this.draw(); // the rest in the next frame
  }

  showPlace(card, { item, index, columns, count }, before) {
    if (item !== before?.item) {
      keepFocus(
        () => this.show(card, item),
        () => card.querySelector("button"),
      );
    }
    if (count !== before?.count) card.setAttribute("aria-setsize", count);
    if (index === before?.index && columns === before.columns) return;
    const column = index % columns;
    card.setAttribute("aria-posinset", index + 1);
    styled(card, {
      width: `calc(${100 / columns}% - 0.75rem)`,
      transform: `translate(calc(${column * 100}% + ${column * 0.75}rem), ${Math.floor(index / columns) * this.height}px)`,
    });
  }
}

function listItem(card) {
  card.setAttribute("role", "listitem");
  return card;
}
