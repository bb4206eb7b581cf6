// Machines that write a text, and sentences about machines that left meanwhile.

import { announce, fill, h, styled } from "./dom.js";
import { hue, layers, layersOf, nameOf, number, pace, plural, seconds } from "./format.js";
import { machinesOf } from "./readiness.js";

const MOST_HOPS = 8; // shown

/** Return a badge with a machine's colour and name. */
export function badge(swarm, id, ...more) {
  const peer = swarm?.peers.get(id) ?? { peer: id, name: "" };
  return styled(h("span", { class: "badge" }, h("i", { "aria-hidden": "true" }), nameOf(peer), ...more), { "--hue": hue(id) });
}

/** State of one text in progress. `happened` holds sentences: which machine left, and which took over. */
export class Writing {
  constructor() {
    this.session = null;
    this.happened = [];
    this.names = new Map(); // names of machines by id, also of those that have left
  }

  /** Take the session's new state. */
  hear(session, swarm) {
    const before = this.session;
    for (const { peer } of session.route) if (swarm?.peers.has(peer)) this.names.set(peer, nameOf(swarm.peers.get(peer)));
    if (before?.route.length) this.compare(before, session);
    this.session = session;
  }

  compare(before, after) {
    const stayed = new Set(after.route.map((hop) => hop.peer));
    const gone = before.route.filter((hop) => !stayed.has(hop.peer));
    const were = new Set(before.route.map((hop) => hop.peer));
    const came = after.route.filter((hop) => !were.has(hop.peer));
    if (!gone.length && !came.length) return;
    const cause = after.faults.findLast((fault) => gone.some((hop) => hop.peer === fault.peer))?.cause.replaceAll("_", " ");
    const who = gone.map((hop) => this.name(hop.peer)).join(" and ") || "A machine";
    const next = came.length ? came.map((hop) => `${this.name(hop.peer)} took over ${layers(hop.span)}`).join(", ") : "the others took over";
    const text = `${who} left${cause ? ` (${cause})` : ""} after token ${before.tokens}; ${next}. The longest wait was ${seconds(after.longest_stall_s)}.`;
    this.happened.push(text);
    announce(text);
  }

  name(id) {
    return this.names.get(id) ?? id.slice(-8);
  }

  /** Return the facts to store with the conversation. */
  summary() {
    return { machines: (this.session?.route ?? []).map((hop) => ({ peer: hop.peer, name: this.name(hop.peer) })), happened: this.happened };
  }
}

/** Show the machines of a text; `isLive` while it is in progress. */
export function showWriting(element, writing, swarm, isLive) {
  const session = writing?.session;
  if (!session) {
    fill(element, h("p", { class: "fine" }, isLive ? "Looking for machines…" : "Send a message to see here which machines answer."));
    return;
  }
  const hops = session.route.slice(0, MOST_HOPS).map((hop) => {
    const device = swarm?.peers.get(hop.peer)?.device ?? "has left";
    return h("li", {}, badge(swarm, hop.peer), h("span", { class: "fine" }, [layersOf(hop.span, swarm?.units), device].filter(Boolean).join(" · ")));
  });
  const rest = session.route.length - hops.length;
  if (rest > 0) hops.push(h("li", { class: "fine" }, `and ${number(rest)} more`));
  const route = h("ol", { class: isLive ? "route live" : "route" }, hops);
  const happened = writing.happened.map((text) => h("li", {}, text));
  const progress = `${plural(session.tokens, "token")}, ${pace(session.tokens_per_s)}`;
  fill(element, h("p", {}, whoWrites(session.route, swarm, isLive)), route, h("p", { class: "fine" }, progress), happened.length ? h("ul", { class: "happened" }, happened) : null);
  styled(element, { "--beat": session.tokens % 2 });
}

/** Say how many machines write: peers on one machine are one. */
function whoWrites(route, swarm, isLive) {
  const count = machinesOf({ peers: swarm?.peers ?? new Map() }, route.map((hop) => hop.peer)).size;
  if (count === 1) return isLive ? "One machine writes this." : "One machine wrote this.";
  return `${number(count)} machines ${isLive ? "write" : "wrote"} this together.`;
}
