// View of this machine, only for its owner: its memory, speed and temperature, what it lends and when, what it does and why.

import { askJson, forgetOwnerToken, isOwner, keepOwnerToken } from "./api.js";
import { $, announce, fill, h, keepFocus, refill, styled } from "./dom.js";
import { bytes, celsius, duration, layersOf, number, pace, percent, plural, rate } from "./format.js";
import { KeptElements } from "./kept-elements.js";
import { LendingOptions } from "./lending-options.js";

const LOOK_MS = 2000;
const JOULES_PER_KWH = 3.6e6;
const COMMANDS = {
  running: [["pause", "Pause", {}], ["finish", "Pause after running work", {}], ["pause", "Pause, keep weights in memory", { keep: "memory" }]],
  finishing: [["resume", "Keep lending", {}], ["pause", "Pause now", {}]],
  draining: [["resume", "Keep lending", {}]],
  paused: [["resume", "Lend again", {}]],
  waiting: [["pause", "Pause", {}]],
};
const DOES = {
  running: "lends",
  finishing: "is finishing its work",
  draining: "is pausing: texts move to other machines",
  paused: "is paused",
  waiting: "is getting ready",
};
const LENDS = {
  memory_bytes: (value) => `${bytes(value)} of memory`,
  disk_bytes: (value) => `${bytes(value)} of disk`,
  max_upload_bps: (value) => `at most ${rate(value)} up`,
  max_download_bps: (value) => `at most ${rate(value)} down`,
  share: (value) => `${percent(value)} of the device's time`,
  max_celsius: (value) => `slower above ${celsius(value)}`,
  max_watts: (value) => `slower above ${number(value)} W`,
  only_idle_s: (value) => `after ${duration(value)} without keyboard or mouse`,
  max_load: (value) => `while other programs use less than ${percent(value)} of the CPUs`,
  exclusive: (value) => `not beside ${value.join(", ")}`,
  hours: (value) => `at ${value}`,
  days: (value) => `on ${value.join(", ")}`,
  on_mains: () => "not on battery",
  max_pressure: (value) => `while programs wait for memory less than ${percent(value)} of the time`,
  unmetered: () => "not on a metered connection",
  max_gpu_memory_bytes: (value) => `while other programs use less than ${bytes(value)} of a GPU's memory`,
  max_gpu_load: (value) => `while other programs use less than ${percent(value)} of a GPU's time`,
  monthly_bytes: (value) => `at most ${bytes(value)} of traffic a month`,
};

export default class MachineView {
  constructor() {
    this.isShown = false;
    this.none = h("p", { class: "card empty", hidden: true }, "No node runs here. To lend this machine to a swarm, run ", h("code", {}, "swarmnode run"), ".");
    this.list = h("div", { class: "nodes" });
    this.cards = new KeptElements(this.list, { make: ({ node }) => new NodeCard(node.node, () => this.look()).element, show: showCard, idOf: ({ node }) => node.node });
    setInterval(() => this.look(), LOOK_MS);
  }

  /** Note whether the view is visible. */
  shown(isShown) {
    this.isShown = isShown;
    this.look();
  }

  async look() {
    if (!this.isShown || document.hidden) return;
    if (!isOwner()) return this.askWho();
    try {
      this.show(await askJson("/api/v1/machine"));
    } catch (error) {
      if (error.code !== "not_owner") return; // the event stream shows that the gateway is away
      forgetOwnerToken();
      this.askWho(error.message);
    }
  }

  askWho(why = "") {
    if ($("machine").querySelector("#owner")) return;
    const field = h("input", { id: "owner", type: "password", autocomplete: "off", required: true });
    const submit = (event) => {
      event.preventDefault();
      keepOwnerToken(field.value);
      fill($("machine"));
      this.look();
    };
    fill(
      $("machine"),
      h(
        "div",
        { class: "card narrow" },
        h("p", {}, "Only the owner of this machine sees and controls its nodes. Open the address that ", h("code", {}, "swarmnode serve"), " prints, or paste it here."),
        why && h("p", { class: "error", role: "alert" }, why),
        h("form", { class: "row", onsubmit: submit }, h("label", {}, "Address or token", field), h("button", { type: "submit" }, "Continue")),
      ),
    );
  }

  show({ nodes, card_celsius: card, cpu_celsius: cpu }) {
    if (!this.list.isConnected) fill($("machine"), this.none, this.list);
    this.none.hidden = nodes.length > 0;
    this.cards.set(nodes.map((node) => ({ node, card, cpu })));
  }
}

const shownCards = new WeakMap(); // cards by their elements

function showCard(element, told, before) {
  if (JSON.stringify(told) !== JSON.stringify(before)) shownCards.get(element).show(told);
}

/** Card of one node. Its form stays while the figures around it change. */
class NodeCard {
  constructor(name, changed) {
    this.name = name;
    this.changed = changed;
    this.head = h("header", {});
    this.stats = h("dl", { class: "stats" });
    this.buttons = h("div", { class: "row" });
    this.said = h("p", { class: "error", role: "alert", hidden: true });
    this.lends = h("ul", {});
    this.gave = h("ul", {});
    this.options = new LendingOptions(name, changed);
    this.element = h(
      "article",
      { class: "card node" },
      this.head,
      this.stats,
      this.buttons,
      this.said,
      h("div", { class: "columns" }, h("section", {}, h("h3", {}, "What it lends, and when"), this.lends, this.options.opener), h("section", {}, h("h3", {}, "What it gave"), this.gave)),
      this.options.element,
    );
    shownCards.set(this.element, this);
  }

  show({ node, card, cpu }) {
    refill(this.head, [node.swarm, node.state, node.reason, node.advice, node.span, node.sessions, node.device], () => [
      h("h2", {}, node.swarm || node.node, h("b", { class: `state ${node.state}` }, node.state)),
      h("p", {}, sentence(node)),
      node.reason && h("p", { class: "why" }, `Reason: ${node.reason}.`),
      node.advice && h("p", { class: "why" }, node.advice),
    ]);
    refill(this.stats, [node.memory, node.room, node.speed, node.span, card, cpu], () => statistics(node, card, cpu));
    this.showButtons(COMMANDS[node.state] ?? []);
    const lends = Object.entries(node.lends ?? {}).map(([name, value]) => LENDS[name]?.(value) ?? name);
    showList(this.lends, lends.length ? lends : ["all free resources, at any time"]);
    showList(this.gave, given(node));
  }

  showButtons(commands) {
    const labels = commands.map(([, label]) => label);
    const buttons = () => commands.map(([command, label, more], index) => this.button(command, label, more, index > 0));
    keepFocus(
      () => refill(this.buttons, labels, () => [buttons()]),
      () => this.buttons.querySelector("button"),
    );
  }

  button(command, label, more, isSecond) {
    const tell = async ({ target }) => {
      if (target.ariaDisabled) return;
      target.ariaDisabled = "true"; // not `disabled`, which would remove its focus
      this.say("");
      try {
        const answer = await askJson(`/api/v1/machine/${encodeURIComponent(this.name)}`, { body: { command, ...more } });
        announce(`${this.name} is ${answer.state}.`);
      } catch (error) {
        this.say(error.message);
      }
      target.ariaDisabled = null;
      this.changed();
    };
    return h("button", { type: "button", class: isSecond && "second", onclick: tell }, label);
  }

  say(text) {
    this.said.hidden = !text;
    this.said.textContent = text;
  }
}

function sentence({ state, swarm, span, sessions, device }) {
  if (state !== "running") return `This machine ${DOES[state] ?? state}${swarm && state === "waiting" ? `: it joins ${swarm}` : ""}.`;
  const what = span && span[1] > span[0] ? `holds ${layersOf(span, NaN)}` : "stands by without layers: training is faster without it at the moment";
  return `It ${what} on ${device || "a device"}; ${sessions ? `${plural(sessions, "text")} in work now` : "no text in work now"}.`;
}

function statistics({ memory = [], room, speed, span }, card, cpu) {
  const degrees = memory.some((each) => each.is_card) ? card : cpu;
  const count = span ? span[1] - span[0] : 0;
  return [
    ...memory.map((each) => figure(memory.length > 1 ? each.device : "Memory", `${bytes(each.used_bytes)} in use`, meter(each), `${bytes(each.lent_bytes)} lent, of ${bytes(each.total_bytes)}`)),
    room && figure("Room", `${number(room.units)} of ${plural(room.of, "layer")}`, null, `of the model fit${room.packed ? ", packed as in its file" : ""}${room.experts ? `, with memory for ${number(room.experts.slots)} of ${plural(room.experts.of, "expert")} a layer` : ""}`),
    speed?.decode > 0 && count > 0 && figure("Speed", pace(speed.decode), null, `one text, through its ${plural(count, "layer")}, as measured here`),
    speed?.training > 0 && count > 0 && figure("Training speed", pace(speed.training), null, `through its ${plural(count, "layer")}, as measured here`),
    degrees != null && figure("Temperature", celsius(degrees), null, memory.some((each) => each.is_card) ? "hottest card" : "CPU"),
  ].filter(Boolean);
}

const figure = (title, now, picture, note) => h("div", {}, h("dt", {}, title), h("dd", {}, h("strong", {}, now), picture, h("span", { class: "fine" }, note)));

function meter({ used_bytes: used, lent_bytes: lent, total_bytes: total }) {
  const share = (size) => `${Math.min(100, (100 * (size ?? total)) / total)}%`;
  return styled(h("span", { class: "meter", "aria-hidden": "true" }, h("i", { class: "lent" }), h("i", { class: "used" })), { "--lent": share(lent), "--used": share(used) });
}

function given(node) {
  const sent = node.link_bytes ?? {};
  const { energy, training } = node;
  return [
    node.tokens ? `${plural(node.tokens, "token")} computed for others` : "nothing computed for others yet",
    `${bytes(sent.sent)} sent, ${bytes(sent.received)} received`,
    training && `training step ${number(training.step)}, loss ${number(training.loss, 4)}`,
    energy && `${number(energy.today_j / JOULES_PER_KWH, 2)} kWh drawn by its cards today, ${number(energy.total_j / JOULES_PER_KWH, 2)} kWh in all`,
  ].filter(Boolean);
}

const showList = (element, texts) => refill(element, texts, () => [texts.map((text) => h("li", {}, text))]);
