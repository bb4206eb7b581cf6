// View of a swarm: missing layers, machines, texts in progress, and the last hour.

import { askJson } from "./api.js";
import { Figures } from "./chart.js";
import { $, h, overFrames, refill } from "./dom.js";
import { bytes, number, plural, seconds } from "./format.js";
import { LinkMatrix } from "./links.js";
import { Machines } from "./machines.js";
import { Members } from "./members.js";
import { machinesOf, modelName, readiness } from "./readiness.js";
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
      looked((swarm) => this.showMachines(swarm)),
      looked((swarm) => this.members.follow(swarm.id)),
      looked((swarm) => this.lookAtOnce(swarm)),
    ];
  }

  showMachines(swarm) {
    const { size } = swarm.peers;
    $("machines-tools").hidden = size < 2;
    $("machines-none").hidden = size > 0;
    $("links-block").hidden = [...swarm.peers.values()].filter((peer) => peer.span[1] > peer.span[0]).length < 2;
    this.machines.set(swarm, { writeText: writesText(swarm) });
  }

  showSessions(swarm) {
    $("sessions-block").hidden = !writesText(swarm);
    this.sessions.show(swarm);
  }
}

const writesText = (swarm) => otherTask(swarm.task) === null;

/** Return the samples of the last hour, and the series that are drawn. */
function seriesOf(samples) {
  const [right, wrong] = ["accepted_per_s", "wasted_per_s"].map((name) => samples.map((each) => each[name]));
  return { samples, tokens: samples.map((each) => each.tokens_per_s), guesses: { right, all: right.map((count, at) => count + wrong[at]) }, losses: samples.map((each) => each.loss).filter((loss) => loss !== null) };
}

function showHead(element, swarm) {
  const { name, mode } = swarm;
  const what = [
    `${mode === "train" ? "Trains" : "Serves"} ${modelName(swarm)}: ${plural(swarm.units, "layer")}, ${bytes(swarm.weights_bytes)}.`,
    mode === "serve" && otherTask(swarm.task),
    swarm.adapters.length && `Adapters: ${swarm.adapters.join(", ")}.`,
  ];
  const { mood, head, more } = readiness(swarm);
  refill(element, [name, what, head, more], () => [
    h("h1", {}, name),
    h("p", { class: "soft" }, what.filter(Boolean).join(" ")),
    h("div", { class: `ready-card ${mood}` }, h("p", { class: "large" }, h("i", { class: "lamp", "aria-hidden": "true" }), head), more.map((text) => h("p", {}, text))),
  ]);
}

function figures(swarm, history) {
  const peers = [...swarm.peers.values()];
  const ready = peers.filter((peer) => peer.state === "ready").length;
  const busy = peers.reduce((sum, peer) => sum + peer.sessions, 0);
  const machines = machinesOf(swarm, [...swarm.peers.keys()]).size;
  const nodes = peers.length > machines && plural(peers.length, "node");
  const note = [nodes, `${number(ready)} ready`, swarm.bootstraps.length && plural(swarm.bootstraps.length, "bootstrap peer")].filter(Boolean).join(", ");
  const shown = [
    { title: "Machines", now: number(machines), note },
    ...(writesText(swarm) ? writing(busy, history) : [{ title: "Passes at machines", now: number(busy), note: "running or waiting" }]),
  ];
  return swarm.mode === "train" ? [...shown, ...training(swarm, history)] : shown;
}

function writing(busy, { tokens, guesses }) {
  const { right, all } = guesses;
  const latest = (values) => number(values.at(-1), all.at(-1) < 10 ? 1 : 0); // short, as the figure has one line on a phone
  return [
    { title: "Texts at machines", now: number(busy), note: "a text counts at each machine that works on it" },
    { title: "Tokens per second, by this gateway", now: number(tokens.at(-1) ?? 0, 1), points: tokens.length > 1 ? tokens : null, note: "a curve of the last hour appears here" },
    ...(all.length > 1 && Math.max(...all) > 0
      ? [{ title: "Right guesses per second (dashed: all)", now: `${latest(right)} of ${latest(all)}`, points: right, above: all }]
      : []),
  ];
}

function training(swarm, { samples, losses }) {
  const [first, last] = [samples[0], samples.at(-1)];
  const steps = first ? last.training_step - first.training_step : 0;
  const pace = steps > 0 ? `${seconds((last.at - first.at) / steps)} a step` : "no step in the last hour";
  return [
    { title: "Training step", now: number(swarm.training_step), note: pace },
    losses.length
      ? { title: "Loss", now: number(losses.at(-1), 4), points: losses, fromZero: false }
      : { title: "Loss", now: "?", note: "known if a node of this machine trains" },
  ];
}
