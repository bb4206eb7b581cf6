// Figures for people.

const GOLDEN_ANGLE = 137.508;

export const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

/** Compare peers by their ids; faster than by a language's rules. */
export const byId = (one, other) => (one.peer < other.peer ? -1 : Number(one.peer > other.peer));

/** Return a peer's name; if it has none, the end of its id. */
export const nameOf = (peer) => peer.name || peer.peer.slice(-8);

/** Name the layers (units) [start, end) by their numbers. */
export const units = ([start, end]) => (end - start === 1 ? `layer ${start}` : `layers ${start}–${end - 1}`);

export function bytes(count) {
  if (!count) return count === 0 ? "0 B" : "?";
  const power = Math.min(4, Math.floor(Math.log10(count) / 3));
  return `${Number((count / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

export function rate(bps) {
  if (!bps) return "not measured";
  return bps < 1e9 ? `${Number((bps / 1e6).toPrecision(3))} Mbit/s` : `${Number((bps / 1e9).toPrecision(3))} Gbit/s`;
}

export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 100 ? `${value.toFixed(1)} s` : duration(value);
}

export function duration(value) {
  const minutes = Math.max(0, Math.round(value / 60));
  if (minutes < 60) return `${minutes} min`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.round(minutes / 1440)} days`;
}

/** Return when something ends, as text; `unix` is in seconds, null means never. */
export function until(unix) {
  if (unix === null) return "for ever";
  const end = new Date(unix * 1000);
  return end < new Date() ? "expired" : `until ${end.toLocaleDateString("en", { dateStyle: "medium" })}`;
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
