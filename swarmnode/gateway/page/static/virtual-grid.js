// Cards of one size in as many columns as fit. Only visible ones exist: a thousand machines cost as much as a screenful.

import { SLICE_MS, everyFrame, h, keepFocus, styled } from "./dom.js";
import { KeptElements } from "./kept-elements.js";

const SPARE_ROWS = 2;
const MOST_PX = 516;

export class VirtualGrid {
  /** `make()` returns an empty card, `show(card, item)` fills it; sizes are in pixels, `idOf(item)` is an item's constant id. */
  constructor(element, { make, show, idOf, width, height, label }) {
    Object.assign(this, { show, width, height });
    this.items = [];
    this.sheet = h("div", { class: "sheet", role: "list", "aria-label": label });
    this.window = h("div", { class: "window", tabindex: "0", role: "region", "aria-label": `${label}, scrollable` }, this.sheet);
    this.cards = new KeptElements(this.sheet, {
      make: () => listItem(make()),
      show: (card, place, before) => this.showPlace(card, place, before),
      idOf: (place) => idOf(place.item),
    });
    element.append(this.window);
    this.draw = everyFrame(() => this.drawNow());
    this.window.addEventListener("scroll", this.draw, { passive: true });
    new ResizeObserver(this.draw).observe(this.window);
  }

  /** Show these items, in this order. */
  set(items) {
    this.items = items;
    this.draw();
  }

  drawNow() {
    const { scrollTop } = this.window; // read everything before writing anything, so that the browser lays out once
    const columns = Math.max(1, Math.floor(this.sheet.clientWidth / this.width));
    const count = this.items.length;
    const rows = Math.ceil(count / columns);
    const first = Math.max(0, Math.floor(scrollTop / this.height) - SPARE_ROWS) * columns;
    const inSight = (Math.ceil(MOST_PX / this.height) + 2 * SPARE_ROWS) * columns;
    if (rows !== this.rows) {
      this.rows = rows;
      styled(this.sheet, { height: `${rows * this.height}px` });
      styled(this.window, { height: `${Math.min(rows * this.height, MOST_PX)}px` });
    }
    const places = this.items.slice(first, first + inSight).map((item, offset) => ({ item, index: first + offset, columns, count }));
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
