// What a swarm can do now, in sentences: ready and how fast, getting ready, or what is missing and what helps.

import { bytes, layers, nameOf, number, pace, plural, runs, some } from "./format.js";

const COMING = new Set(["loading", "joining"]);

/** Return the state of a swarm: `mood` (ready, coming, lacking), `head`, a sentence, and `more`, sentences that explain it. */
export function readiness(swarm) {
  const missing = runs(swarm.holders.flatMap((count, layer) => (count ? [] : [layer])));
  if (!missing.length) return ready(swarm);
  const peers = [...swarm.peers.values()];
  const coming = peers.filter((peer) => COMING.has(peer.state) && peer.span[1] > peer.span[0]);
  const left = runs(missing.flatMap(range).filter((layer) => !coming.some((peer) => peer.span[0] <= layer && layer < peer.span[1])));
  if (!left.length) return gettingReady(swarm, coming);
  return lacking(swarm, missing, left, coming, peers.filter((peer) => peer.state === "paused"));
}

/** Return a model's short name: of a model of the hub its own, else that of the swarm. */
export const modelName = ({ model, name }) => (model.includes("/") ? model.split("/").at(-1) : name);

/** Return the distinct machines of some peers. */
export const machinesOf = (swarm, peers) => new Set(peers.map((id) => swarm.peers.get(id)?.machine ?? id));

/** Return the fewest ready peers that hold all layers, in order; null if some layers are missing. */
export function fewestPeers({ units, peers }) {
  const there = [...peers.values()].filter((peer) => peer.state === "ready");
  const found = [];
  for (let at = 0; at < units; at = found.at(-1).span[1]) {
    const next = there.reduce((best, peer) => (peer.span[0] <= at && peer.span[1] > (best?.span[1] ?? at) ? peer : best), null);
    if (!next) return null;
    found.push(next);
  }
  return found;
}

function ready(swarm) {
  const { units, mode, peers } = swarm;
  const all = modelName(swarm);
  const route = fewestPeers(swarm);
  const whole = machinesOf(swarm, [...peers.values()].filter((peer) => peer.state === "ready" && peer.span[1] - peer.span[0] === units).map((peer) => peer.peer)).size;
  const together = machinesOf(swarm, [...peers.values()].filter((peer) => peer.state === "ready" && peer.span[1] > peer.span[0]).map((peer) => peer.peer)).size;
  const who = whole > 1 ? `${plural(whole, "machine")} each hold all` : whole || together === 1 ? "one machine holds all" : `${plural(together, "machine")} together hold all`;
  const speed = mode === "train" ? "" : speedOf(swarm, route);
  const head = `${mode === "train" ? "Training" : "Ready"}: ${who} of ${all}${speed && `, ${speed}`}`;
  return { mood: "ready", head, more: [safety(swarm), ...ungivenText(swarm)] };
}

/** Return the measured speed of a text; before the first text an estimate from the machines' own measurements; empty if there is none. */
function speedOf(swarm, route) {
  if (swarm.task !== "generate") return "";
  if (swarm.tokens_per_s) return pace(swarm.tokens_per_s);
  const perToken = route.reduce((sum, { span, decode_units_per_s: speed }) => sum + (speed ? (span[1] - span[0]) / speed : Infinity), 0);
  return Number.isFinite(perToken) && perToken > 0 ? `about ${pace(1 / perToken)}` : "";
}

function safety({ holders }) {
  const alone = runs(holders.flatMap((count, layer) => (count === 1 ? [layer] : [])));
  if (!alone.length) return `Each layer is on ${plural(Math.min(...holders), "machine")} or more: if one leaves, the others go on.`;
  if (alone[0][1] - alone[0][0] === holders.length) return "If another machine joins, texts go on when one of them leaves.";
  return `Only one machine holds ${some(alone.map(layers))}: the swarm stops if it leaves.`;
}

function ungivenText({ ungiven = [] }) {
  if (!ungiven.length) return [];
  return [`No machine gives the weights of ${some(runs(ungiven).map(layers))} to new machines: the host's model file was moved or changed, or its bootstrap peer is away.`];
}

function gettingReady(swarm, coming) {
  const who = some(coming.map((peer) => `${nameOf(peer)} (${layers(peer.span)})`));
  const verb = coming.length === 1 ? "is" : "are";
  return { mood: "coming", head: `Getting ready: ${who} ${verb} loading ${modelName(swarm)}`, more: ["This needs nothing from you: texts can be written as soon as the layers are in memory."] };
}

function lacking(swarm, missing, left, coming, paused) {
  const { units, weights_bytes: size, name } = swarm;
  const none = left.length === 1 && left[0][1] - left[0][0] === units;
  const what = none ? `no machine holds ${modelName(swarm)} yet` : `${some(left.map(layers))} of ${modelName(swarm)} ${countOf(left) === 1 ? "is" : "are"} missing`;
  const more = [`A machine with room for ${bytes((countOf(left) * size) / units)} of weights, and for their caches, is needed: on it, run “swarmnode run ${name}”. It chooses the missing layers by itself.`];
  if (paused.length) more.unshift(`${some(paused.map(nameOf))} ${paused.length === 1 ? "is" : "are"} paused: resuming (“swarmnode resume”, or under This machine) brings layers back.`);
  if (coming.length) more.push(`${some(coming.map((peer) => `${nameOf(peer)} (${layers(peer.span)})`))} ${coming.length === 1 ? "is" : "are"} loading.`);
  more.push(...ungivenText(swarm));
  return { mood: "lacking", head: `Not ready: ${what}`, more };
}

const range = ([start, end]) => Array.from({ length: end - start }, (_, offset) => start + offset);
const countOf = (spans) => spans.reduce((sum, [start, end]) => sum + end - start, 0);

/** Return how many machines write the present or the next text of a swarm, as the beginning of a sentence. */
export function writersText(swarm) {
  const route = fewestPeers(swarm);
  if (!route) return "";
  const count = machinesOf(swarm, route.map((peer) => peer.peer)).size;
  return count === 1 ? `One machine writes the answers: ${nameOf(route[0])}${route[0].device && `, ${route[0].device}`}.` : `${number(count)} machines write each sentence together.`;
}
