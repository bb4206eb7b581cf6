// A swarm at a glance: what it lacks, who is there, what is written now, and how the last hour went.

import { askJson } from "./api.js";
import { chart, figure } from "./chart.js";
import { $, everyFrame, fill, h } from "./dom.js";
import { bytes, plural, runs, seconds, units } from "./format.js";
import { showLinks } from "./links.js";
import { Machines } from "./machines.js";
import { Members } from "./members.js";
import { coverage, coverageText, holders, strip } from "./strip.js";
import { badge } from "./writers.js";

const LINKS_MS = 10_000;
const HISTORY_MS = 10_000;

/** A swarm as its events tell it: `peers` by id. */
export class Swarm {
  constructor() {
    this.peers = new Map();
  }

  /** Raises nothing: what is not known is passed over. */
  hear(name, told) {
    const { peers = [], gone = [], ...rest } = told;
    if (name === "swarm") this.peers = new Map();
    Object.assign(this, rest);
    for (const peer of peers) this.peers.set(peer.peer, peer);
    for (const id of gone) this.peers.delete(id);
  }
}

export class SwarmView {
  constructor() {
    this.swarm = null;
    this.isShown = false;
    this.machines = new Machines($("machines"));
    this.members = new Members();
    this.refresh = everyFrame(() => this.show());
    $("link-kind").addEventListener("change", () => this.showLinks());
    setInterval(() => this.look("links"), LINKS_MS);
    setInterval(() => this.look("history"), HISTORY_MS);
  }

  /** Show this one. */
  follow(swarm) {
    this.swarm = swarm;
    this.links = null;
    this.history = null;
    this.refresh();
  }

  /** Whether the view is looked at. */
  shown(isShown) {
    this.isShown = isShown;
    this.members.shown(isShown);
    if (!isShown) return;
    this.refresh();
    this.look("links");
    this.look("history");
  }

  /** Ask for what is not told by events. */
  async look(what) {
    if (!this.isShown || document.hidden || !this.swarm?.id) return;
    try {
      this[what] = await askJson(`/api/v1/swarms/${encodeURIComponent(this.swarm.id)}/${what}`);
    } catch {
      return; // the stream of events tells that the gateway is away
    }
    if (what === "links") this.showLinks();
    else this.refresh();
  }

  showLinks() {
    if (this.links) showLinks($("links"), this.links, this.swarm, $("link-kind").value);
  }

  show() {
    const { swarm } = this;
    if (!swarm?.id) return;
    coverage($("coverage"), swarm);
    if (!this.isShown) return;
    const writing = new Set(swarm.sessions.flatMap((session) => session.route.map((hop) => hop.peer)));
    fill($("swarm-head"), headline(swarm));
    strip($("strip"), swarm, writing);
    fill($("figures"), figures(swarm, this.history?.samples ?? []));
    fill($("sessions"), sessions(swarm));
    this.machines.set(swarm.peers);
    this.members.follow(swarm.id);
  }
}

function headline(swarm) {
  const counts = holders(swarm);
  const size = swarm.weights_bytes / swarm.units;
  const lacks = runs(swarm.missing).map((run) => `${units(run)}: about ${bytes((run[1] - run[0]) * size)} of weights`);
  return [
    h("h1", {}, swarm.name),
    h("p", {}, `${swarm.mode === "train" ? "Trains" : "Serves"} ${swarm.model}, ${plural(swarm.units, "unit")}, ${bytes(swarm.weights_bytes)}.`),
    h("p", { class: swarm.missing.length ? "lacks" : "whole" }, coverageText(swarm, counts)),
    lacks.length ? h("p", {}, `It needs machines with room for ${lacks.join("; ")}, and their caches.`) : null,
  ];
}

function figures(swarm, samples) {
  const ready = [...swarm.peers.values()].filter((peer) => peer.state === "ready").length;
  const busy = [...swarm.peers.values()].reduce((sum, peer) => sum + peer.sessions, 0);
  const shown = [
    figure("Machines", String(swarm.peers.size), `${ready} ready, ${plural(swarm.bootstraps.length, "bootstrap peer")}`),
    figure("Sessions at machines", String(busy), "each text has one at every machine of its route"),
    chart("Tokens per second, by this gateway", (samples.at(-1)?.tokens_per_s ?? 0).toFixed(1), samples.map((each) => each.tokens_per_s)),
  ];
  return swarm.mode === "train" ? [...shown, ...training(swarm, samples)] : shown;
}

function training(swarm, samples) {
  const losses = samples.map((each) => each.loss).filter((loss) => loss !== null);
  const [first, last] = [samples[0], samples.at(-1)];
  const steps = first ? last.training_step - first.training_step : 0;
  const pace = steps > 0 ? `${seconds((last.at - first.at) / steps)} a step` : "no step in the last hour";
  return [
    figure("Training step", swarm.training_step.toLocaleString("en"), pace),
    losses.length
      ? chart("Loss", losses.at(-1).toFixed(4), losses, { fromZero: false })
      : figure("Loss", "?", "known where a node of this machine trains"),
  ];
}

function sessions(swarm) {
  if (!swarm.sessions.length) return h("p", { class: "fine" }, "Nothing, by this gateway.");
  const rows = swarm.sessions.map((session) =>
    h(
      "li",
      {},
      session.route.map((hop) => badge(swarm, hop.peer, h("small", {}, ` ${hop.span[0]}–${hop.span[1] - 1}`))),
      h("span", { class: "fine" }, `${plural(session.tokens, "token")} at ${session.tokens_per_s.toFixed(1)}/s`),
      session.reroutes ? h("span", { class: "fine" }, `, moved ${plural(session.reroutes, "time")}`) : null,
    ),
  );
  return h("ul", { class: "sessions" }, rows);
}
