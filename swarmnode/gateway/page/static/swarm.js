// View of a swarm: missing layers, machines, texts in progress, and the last hour.

import { askJson } from "./api.js";
import { Figures } from "./chart.js";
import { coverageText } from "./coverage.js";
import { $, h, overFrames, refill } from "./dom.js";
import { bytes, plural, runs, seconds, units } from "./format.js";
import { LinkMatrix } from "./links.js";
import { Machines } from "./machines.js";
import { Members } from "./members.js";
import { Sessions } from "./sessions.js";
import { Strip } from "./strip.js";
import { otherTask } from "./tasks.js";

const LINKS_MS = 10_000;
const HISTORY_MS = 10_000;

export default class SwarmView {
  constructor() {
    this.swarm = null;
    this.isShown = false;
    this.strip = new Strip($("strip"));
    this.figures = new Figures($("figures"));
    this.sessions = new Sessions($("sessions"));
    this.machines = new Machines($("machines"));
    this.matrix = new LinkMatrix($("links"));
    this.members = new Members();
    this.refresh = overFrames(this.parts());
    $("link-kind").addEventListener("change", () => this.showLinks());
    setInterval(() => this.look("links"), LINKS_MS);
    setInterval(() => this.look("history"), HISTORY_MS);
  }

  /** Show this swarm. */
  follow(swarm) {
    this.swarm = swarm;
    this.links = null;
    this.history = seriesOf([]);
    this.refresh();
  }

  /** Note whether the view is visible. */
  shown(isShown) {
    this.isShown = isShown;
    this.members.shown(isShown);
    this.asked = null;
    this.refresh();
  }

  /** Ask at once for the data that events do not contain. */
  lookAtOnce(swarm) {
    if (this.asked === swarm) return;
    this.asked = swarm;
    this.look("links");
    this.look("history");
  }

  /** Ask for data that events do not contain. */
  async look(what) {
    const { swarm } = this;
    if (!this.isShown || document.hidden || !swarm?.id) return;
    let told;
    try {
      told = await askJson(`/api/v1/swarms/${encodeURIComponent(swarm.id)}/${what}`);
    } catch {
      return; // the event stream shows that the gateway is away
    }
    if (swarm !== this.swarm) return; // the user has chosen another swarm
    if (what === "links") {
      this.links = told;
      this.showLinks();
    } else {
      this.history = seriesOf(told.samples);
      this.refresh();
    }
  }

  showLinks() {
    if (this.links) this.matrix.show(this.links, this.swarm, $("link-kind").value);
  }

  /** Return the parts that an event may change; they are updated one after the other, so that none delays a frame for the others. */
  parts() {
    const looked = (show) => () => this.isShown && this.swarm?.id && show(this.swarm);
    return [
      looked((swarm) => showHead($("swarm-head"), swarm)),
      looked((swarm) => this.strip.show(swarm)),
      looked((swarm) => this.figures.set(figures(swarm, this.history))),
      looked((swarm) => this.showSessions(swarm)),
      looked((swarm) => this.machines.set(swarm.peers, { writeText: writesText(swarm) })),
      looked((swarm) => this.members.follow(swarm.id)),
      looked((swarm) => this.lookAtOnce(swarm)),
    ];
  }

  showSessions(swarm) {
    $("sessions-block").hidden = !writesText(swarm);
    this.sessions.show(swarm);
  }
}

const writesText = (swarm) => otherTask(swarm.task) === null;

/** Return the samples of the last hour, and the series that are drawn. */
function seriesOf(samples) {
  return { samples, tokens: samples.map((each) => each.tokens_per_s), losses: samples.map((each) => each.loss).filter((loss) => loss !== null) };
}

function showHead(element, swarm) {
  const { name, mode, model, missing } = swarm;
  const size = swarm.weights_bytes / swarm.units;
  const what = [
    `${mode === "train" ? "Trains" : "Serves"} ${model}, ${plural(swarm.units, "layer")}, ${bytes(swarm.weights_bytes)}.`,
    mode === "serve" && otherTask(swarm.task),
    swarm.adapters.length && `Adapters: ${swarm.adapters.join(", ")}.`,
  ];
  const lacks = runs(missing).map((run) => `${units(run)}: about ${bytes((run[1] - run[0]) * size)} of weights`);
  const covered = coverageText(swarm);
  refill(element, [name, what, covered, lacks], () => [
    h("h1", {}, name),
    h("p", {}, what.filter(Boolean).join(" ")),
    h("p", { class: missing.length ? "lacks" : "whole" }, covered),
    lacks.length ? h("p", {}, `It needs machines with room for ${lacks.join("; ")}, and their caches.`) : null,
  ]);
}

function figures(swarm, history) {
  const peers = [...swarm.peers.values()];
  const ready = peers.filter((peer) => peer.state === "ready").length;
  const busy = peers.reduce((sum, peer) => sum + peer.sessions, 0);
  const shown = [
    { title: "Machines", now: String(swarm.peers.size), note: `${ready} ready, ${plural(swarm.bootstraps.length, "bootstrap peer")}` },
    ...(writesText(swarm) ? writing(busy, history) : [{ title: "Passes at machines", now: String(busy), note: "running or waiting" }]),
  ];
  return swarm.mode === "train" ? [...shown, ...training(swarm, history)] : shown;
}

function writing(busy, { tokens }) {
  return [
    { title: "Sessions at machines", now: String(busy), note: "each text has one at each machine of its route" },
    { title: "Tokens per second, by this gateway", now: (tokens.at(-1) ?? 0).toFixed(1), points: tokens },
  ];
}

function training(swarm, { samples, losses }) {
  const [first, last] = [samples[0], samples.at(-1)];
  const steps = first ? last.training_step - first.training_step : 0;
  const pace = steps > 0 ? `${seconds((last.at - first.at) / steps)} a step` : "no step in the last hour";
  return [
    { title: "Training step", now: swarm.training_step.toLocaleString("en"), note: pace },
    losses.length
      ? { title: "Loss", now: losses.at(-1).toFixed(4), points: losses, fromZero: false }
      : { title: "Loss", now: "?", note: "known if a node of this machine trains" },
  ];
}
