// This machine: what it lends, what it does now and why, and what it has given. For its owner alone.

import { askJson, isOwner, keepOwnerToken } from "./api.js";
import { $, announce, fill, h, keepFocus } from "./dom.js";
import { bytes, plural, rate, units } from "./format.js";

const LOOK_MS = 2000;
const COMMANDS = {
  running: [["pause", "Pause", {}], ["pause", "Pause, keep the weights in memory", { keep: "memory" }], ["finish", "Finish what runs, then pause", {}]],
  finishing: [["resume", "Go on after all", {}], ["pause", "Pause now", {}]],
  draining: [["resume", "Go on after all", {}]],
  paused: [["resume", "Lend again", {}]],
  waiting: [["pause", "Pause", {}]],
};
const percent = (share) => `${Math.round(share * 100)} %`;
const LENDS = {
  memory_bytes: (value) => `${bytes(value)} of memory`,
  disk_bytes: (value) => `${bytes(value)} of disk`,
  max_upload_bps: (value) => `at most ${rate(value)} up`,
  max_download_bps: (value) => `at most ${rate(value)} down`,
  share: (value) => `${percent(value)} of the device's time`,
  only_idle_s: (value) => `when nobody has touched it for ${Math.round(value / 60)} min`,
  max_load: (value) => `while other programs use less than ${percent(value)} of the CPUs`,
  exclusive: (value) => `not beside ${value.join(", ")}`,
  hours: (value) => `at ${value}`,
  days: (value) => `on ${value.join(", ")}`,
  on_mains: () => "not on battery",
  max_pressure: (value) => `while programs wait for memory less than ${percent(value)} of the time`,
  unmetered: () => "not where the connection is paid by what it carries",
  max_gpu_memory_bytes: (value) => `while other programs use less than ${bytes(value)} of a card`,
  max_gpu_load: (value) => `while other programs use less than ${percent(value)} of a card's time`,
  monthly_bytes: (value) => `at most ${bytes(value)} of traffic a month`,
};

export default class MachineView {
  constructor() {
    this.isShown = false;
    setInterval(() => this.look(), LOOK_MS);
  }

  /** Whether the view is looked at. */
  shown(isShown) {
    this.isShown = isShown;
    this.look();
  }

  async look() {
    if (!this.isShown || document.hidden) return;
    if (!isOwner()) return this.askWho();
    try {
      this.show((await askJson("/api/v1/machine")).nodes);
    } catch (error) {
      if (error.code === "not_owner") this.askWho(error.message);
    }
  }

  askWho(why = "") {
    if ($("machine").querySelector("form")) return;
    const field = h("input", { id: "owner", type: "password", autocomplete: "off" });
    const submit = (event) => {
      event.preventDefault();
      keepOwnerToken(field.value);
      fill($("machine"));
      this.look();
    };
    fill(
      $("machine"),
      h("p", {}, "Only the owner of this machine sees and commands its nodes. Open the address that `swarmnode serve` prints, or paste it here."),
      why && h("p", { class: "error" }, why),
      h("form", { class: "row", onsubmit: submit }, h("label", {}, "Address or token", field), h("button", { type: "submit" }, "Go on")),
    );
  }

  show(nodes) {
    const told = JSON.stringify(nodes);
    if (told === this.told && $("machine").childElementCount) return;
    this.told = told;
    const { node, command } = document.activeElement.dataset;
    const none = h("p", {}, "No node runs here. ", h("code", {}, "swarmnode run"), " lends this machine to a swarm.");
    keepFocus(
      () => fill($("machine"), nodes.length ? nodes.map((each) => this.card(each)) : none),
      () => buttonOf(node, command),
    );
  }

  card(node) {
    const lends = Object.entries(node.lends ?? {}).map(([name, value]) => h("li", {}, LENDS[name]?.(value) ?? name));
    const sent = node.link_bytes ?? {};
    const gave = [
      `${plural(node.tokens ?? 0, "position")} computed for others`,
      `${bytes(sent.sent)} sent, ${bytes(sent.received)} received`,
      node.training && `training step ${node.training.step}, loss ${node.training.loss.toFixed(4)}`,
    ].filter(Boolean);
    return h(
      "article",
      { class: "card node" },
      h("h2", {}, node.node, h("b", { class: `state ${node.state}` }, node.state)),
      node.reason && h("p", {}, `Because: ${node.reason}.`),
      h("p", {}, `${node.swarm ?? ""}${node.span ? `, ${units(node.span)}` : ""}, ${plural(node.sessions ?? 0, "session")} now, on ${node.device ?? "?"}.`),
      h("div", { class: "row" }, (COMMANDS[node.state] ?? []).map(([command, label, more]) => this.button(node.node, command, label, more))),
      h("div", { class: "columns" }, part("What it lends", lends.length ? lends : [h("li", {}, "whatever is free, at any time")]), part("What it gave", gave.map((each) => h("li", {}, each)))),
    );
  }

  button(node, command, label, more) {
    const tell = async ({ target }) => {
      if (target.ariaDisabled) return;
      target.ariaDisabled = "true"; // not `disabled`, which would take the focus from it
      try {
        const answer = await askJson(`/api/v1/machine/${encodeURIComponent(node)}`, { body: { command, ...more } });
        announce(`${node} is ${answer.state}.`);
      } catch (error) {
        announce(`${node}: ${error.message}`);
      }
      this.told = null;
      this.look();
    };
    return h("button", { type: "button", data: { node, command: label }, onclick: tell }, label);
  }
}

/** The button by which a node is told this, else its first one. */
function buttonOf(node, command) {
  const all = [...$("machine").querySelectorAll("button")].filter((each) => each.dataset.node === node);
  return all.find((each) => each.dataset.command === command) ?? all[0];
}

const part = (title, items) => h("section", {}, h("h3", {}, title), h("ul", {}, items));
