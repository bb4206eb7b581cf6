// Elements built from values. Text stays text, whoever wrote it: nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";
export const SLICE_MS = 4; // of a frame, for work that can wait for the next frame

export const $ = (id) => document.getElementById(id);

/** Create an element. Properties that begin with `on` are listeners, `data` is a dataset, false and null are left out, the rest are attributes. */
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

/** Create an SVG element. */
export function s(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Replace the children of an element and return the element. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

const shown = new WeakMap(); // values that elements were filled for

/** Fill an element with `make()`, unless it already shows the same value; return the element. */
export function refill(element, value, make) {
  const told = JSON.stringify(value);
  if (shown.get(element) === told) return element;
  shown.set(element, told);
  return fill(element, ...[make()].flat(2));
}

/** Set properties of an element's style and return the element. */
export function styled(element, properties) {
  for (const [name, value] of Object.entries(properties)) element.style.setProperty(name, value);
  return element;
}

/** Return a function that lets `work` run once before the next frame, however often it is called. */
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

/** Return a function that lets `works` run one after the other, over as many frames as they need, once however often it is called. */
export function overFrames(works) {
  let next = works.length;
  let again = false; // called again after some of them had run
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

/** Run `work`. If it removes or hides the focused element, focus `next()`, so that the keyboard continues from there. */
export function keepFocus(work, next) {
  const focused = document.activeElement;
  work();
  if (!focused.isConnected || focused.hidden) next()?.focus();
}

/** Announce a text to screen readers. */
export function announce(text) {
  $("status").textContent = text;
}
