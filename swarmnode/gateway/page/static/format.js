// Figures for people, in the manner of the reader's own country: numbers, units and dates follow the browser's locale.

const GOLDEN_ANGLE = 137.508;
const BYTES = ["byte", "kilobyte", "megabyte", "gigabyte", "terabyte"];

/** Return a number; `digits` are the most digits after the point. */
export const number = (value, digits = 0) => value.toLocaleString(undefined, { maximumFractionDigits: digits });

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

const measure = (value, unit, unitDisplay = "short") => value.toLocaleString(undefined, { style: "unit", unit, unitDisplay, maximumSignificantDigits: 3 });

/** Compare peers by their ids; faster than by a language's rules. */
export const byId = (one, other) => (one.peer < other.peer ? -1 : Number(one.peer > other.peer));

/** Return a peer's name; if it has none, the end of its id. */
export const nameOf = (peer) => peer.name || peer.peer.slice(-8);

/** Name the layers [start, end) by their numbers. */
export const layers = ([start, end]) => (end - start === 1 ? `layer ${start}` : `layers ${start}–${end - 1}`);

/** Name the layers [start, end) of a model with `all` layers. */
export const layersOf = ([start, end], all) => (end - start === all ? `all ${number(all)} layers` : layers([start, end]));

/** Return the first texts of a list in words, as "a, b and 3 more". */
export function some(texts, most = 3) {
  const shown = texts.length > most ? [...texts.slice(0, most), `${number(texts.length - most)} more`] : texts;
  return shown.length > 1 ? `${shown.slice(0, -1).join(", ")} and ${shown.at(-1)}` : (shown[0] ?? "");
}

export function bytes(count) {
  if (!count) return count === 0 ? measure(0, "byte") : "?";
  const power = Math.min(BYTES.length - 1, Math.floor(Math.log10(count) / 3));
  return measure(count / 1000 ** power, BYTES[power]);
}

export function rate(bps) {
  if (!bps) return "not measured";
  return bps < 1e9 ? measure(bps / 1e6, "megabit-per-second") : measure(bps / 1e9, "gigabit-per-second");
}

/** Return a speed in words; `what` is the thing that is counted. */
export const pace = (perSecond, what = "tokens") => `${number(perSecond, perSecond < 100 ? 1 : 0)} ${what}/s`;

export const percent = (share) => share.toLocaleString(undefined, { style: "percent" });

export const celsius = (degrees) => measure(degrees, "celsius");

export function seconds(value) {
  if (value < 1) return measure(Math.round(value * 1000), "millisecond");
  return value < 100 ? measure(value, "second") : duration(value);
}

export function duration(value) {
  const minutes = Math.max(0, Math.round(value / 60));
  if (minutes < 60) return measure(minutes, "minute");
  if (minutes >= 2880) return measure(Math.round(minutes / 1440), "day", "long");
  return [measure(Math.floor(minutes / 60), "hour"), minutes % 60 && measure(minutes % 60, "minute")].filter(Boolean).join(" ");
}

/** Return when something ends, as text; `unix` is in seconds, null means never. */
export function until(unix) {
  if (unix === null) return "for ever";
  const end = new Date(unix * 1000);
  return end < new Date() ? "expired" : `until ${end.toLocaleDateString(undefined, { dateStyle: "medium" })}`;
}

/** Return the hue of a machine's colour, which follows from its id and is the same everywhere. */
export function hue(peer) {
  let hash = 0;
  for (const character of peer) hash = (hash * 31 + character.codePointAt(0)) >>> 0;
  return ((hash % 997) * GOLDEN_ANGLE) % 360;
}

/** Return sorted numbers as ranges [start, end) of consecutive ones. */
export function runs(numbers) {
  const found = [];
  for (const number of numbers) {
    if (found.length && found.at(-1)[1] === number) found.at(-1)[1] += 1;
    else found.push([number, number + 1]);
  }
  return found;
}
