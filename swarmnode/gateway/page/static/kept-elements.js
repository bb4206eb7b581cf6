// Elements that stay as long as their items: an update costs only what has changed.

export class KeptElements {
  /** Elements in `parent` for items with the ids `idOf(item)`. `make(item)` creates one, and `show(element, item, before)` updates it
   * where `item` differs from `before`, the item that it showed until now, or null. */
  constructor(parent, { make, show, idOf }) {
    Object.assign(this, { parent, make, show, idOf });
    this.kept = new Map(); // by id: [element, its item]
  }

  /** Show exactly these items; new ones come last. Stops at the time `until`. Returns whether all are shown. */
  set(items, until = Infinity) {
    const ids = new Set(items.map(this.idOf));
    for (const [id, [element]] of this.kept) {
      if (ids.has(id)) continue;
      element.remove();
      this.kept.delete(id);
    }
    return items.every((item) => {
      if (performance.now() >= until) return false;
      this.place(this.idOf(item), item);
      return true;
    });
  }

  place(id, item) {
    const [element, before] = this.kept.get(id) ?? [this.make(item), null];
    if (!before) this.parent.append(element);
    this.show(element, item, before);
    this.kept.set(id, [element, item]);
  }
}
