// Elements out of values. Text goes in as text, whoever wrote it: nothing here ever parses markup.

const SVG = "http://www.w3.org/2000/svg";
export const SLICE_MS = 4; // of a frame, for what may also be done in the next

export const $ = (id) => document.getElementById(id);

/** An element. Properties that begin with `on` are listeners, `data` is a dataset, false and null are left out, the rest are attributes. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === false || value == null) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value" || name === "disabled" || name === "hidden") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

/** An element of a picture. */
export function s(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** The element with these children and no others. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

const shown = new WeakMap(); // what elements were filled for

/** The element filled with what `make()` is, unless it shows the same value already. */
export function refill(element, value, make) {
  const told = JSON.stringify(value);
  if (shown.get(element) === told) return element;
  shown.set(element, told);
  return fill(element, ...[make()].flat(2));
}

/** Let custom properties of a style be these values. */
export function styled(element, properties) {
  for (const [name, value] of Object.entries(properties)) element.style.setProperty(name, value);
  return element;
}

/** Calls `work` before the next frame, once, however often it was asked for. */
export function everyFrame(work) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      work();
    });
  };
}

/** Calls `works` one after the other, once, however often it was asked for: in each frame as many as leave it time. */
export function overFrames(works) {
  let next = works.length;
  let again = false; // asked for while some of them were done already
  const slice = () => {
    const until = performance.now() + SLICE_MS;
    do works[next++]();
    while (next < works.length && performance.now() < until);
    if (next === works.length && again) {
      again = false;
      next = 0;
    }
    if (next < works.length) requestAnimationFrame(slice);
  };
  return () => {
    if (next === works.length) {
      next = 0;
      requestAnimationFrame(slice);
    } else if (next > 0) again = true;
  };
}

/** Do `work`. Where that takes away what has the focus, or hides it, `next()` has it then: the keyboard goes on from there. */
export function keepFocus(work, next) {
  const focused = document.activeElement;
  work();
  if (!focused.isConnected || focused.hidden) next()?.focus();
}

/** Tell those who listen to the page, without moving anything. */
export function announce(text) {
  $("status").textContent = text;
}
