// Cards of one size in as many columns as fit, of which only those in sight exist: a thousand machines cost what a screenful does.

import { everyFrame, h, styled } from "./dom.js";

const SPARE_ROWS = 2;
const MOST_PX = 516;

export class VirtualGrid {
  /** `make()` is an empty card, `show(card, item)` writes an item on it; sizes are in pixels, `idOf(item)` stays the same. */
  constructor(element, { make, show, idOf, width, height, label }) {
    Object.assign(this, { make, show, idOf, width, height });
    this.items = [];
    this.cards = new Map(); // in sight, by id: [card, the item that is on it]
    this.sheet = h("div", { class: "sheet", role: "list", "aria-label": label });
    this.window = h("div", { class: "window", tabindex: "0", role: "region", "aria-label": `${label}, scrollable` }, this.sheet);
    element.append(this.window);
    this.draw = everyFrame(() => this.drawNow());
    this.window.addEventListener("scroll", this.draw, { passive: true });
    new ResizeObserver(this.draw).observe(this.window);
  }

  /** Show these, in this order. */
  set(items) {
    this.items = items;
    this.draw();
  }

  drawNow() {
    const { scrollTop } = this.window; // everything is read before anything is written: the browser lays out once
    const columns = Math.max(1, Math.floor(this.sheet.clientWidth / this.width));
    const rows = Math.ceil(this.items.length / columns);
    const first = Math.max(0, Math.floor(scrollTop / this.height) - SPARE_ROWS) * columns;
    const inSight = Math.ceil(MOST_PX / this.height) + 2 * SPARE_ROWS;
    styled(this.sheet, { height: `${rows * this.height}px` });
    styled(this.window, { height: `${Math.min(rows * this.height, MOST_PX)}px` });
    const shown = this.items.slice(first, first + inSight * columns);
    this.forget(new Set(shown.map(this.idOf)));
    shown.forEach((item, offset) => this.place(item, first + offset, columns));
  }

  forget(ids) {
    for (const [id, [card]] of this.cards) {
      if (ids.has(id)) continue;
      card.remove();
      this.cards.delete(id);
    }
  }

  place(item, index, columns) {
    const id = this.idOf(item);
    let [card, written] = this.cards.get(id) ?? [null, null];
    if (!card) {
      card = this.make();
      card.setAttribute("role", "listitem");
      this.sheet.append(card);
    }
    if (written !== item) this.show(card, item);
    this.cards.set(id, [card, item]);
    card.setAttribute("aria-setsize", this.items.length);
    card.setAttribute("aria-posinset", index + 1);
    styled(card, {
      width: `calc(${100 / columns}% - 0.75rem)`,
      transform: `translate(calc(${(index % columns) * 100}% + ${(index % columns) * 0.75}rem), ${Math.floor(index / columns) * this.height}px)`,
    });
  }
}
