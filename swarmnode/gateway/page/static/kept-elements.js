// Elements that stay for as long as what they show is there: an update costs what has changed, not what is to be seen.

export class KeptElements {
  /** Of items by `idOf(item)`, in `parent`: `make(item)` is a new one, and `show(element, item, before)` writes on it what is not as
   * in `before`, the item that it showed until now, or null. */
  constructor(parent, { make, show, idOf }) {
    Object.assign(this, { parent, make, show, idOf });
    this.kept = new Map(); // by id: [element, the item that is on it]
  }

  /** Show these and no others; new ones come last. Returns whether all are shown: not those that would come after `until`. */
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
