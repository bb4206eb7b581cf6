// View of this machine, only for its owner: what it lends, what it does and why, and what it has contributed.

import { askJson, isOwner, keepOwnerToken } from "./api.js";
import { $, announce, fill, h, keepFocus } from "./dom.js";
import { bytes, plural, rate, units } from "./format.js";

const LOOK_MS = 2000;
const COMMANDS = {
  running: [["pause", "Pause", {}], ["pause", "Pause, keep the weights in memory", { keep: "memory" }], ["finish", "Finish running work, then pause", {}]],
  finishing: [["resume", "Keep lending", {}], ["pause", "Pause now", {}]],
  draining: [["resume", "Keep lending", {}]],
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
  only_idle_s: (value) => `after ${Math.round(value / 60)} min without keyboard or mouse`,
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
      h("p", {}, "Only the owner of this machine sees and controls its nodes. Open the address that `swarmnode serve` prints, or paste it here."),
      why && h("p", { class: "error" }, why),
      h("form", { class: "row", onsubmit: submit }, h("label", {}, "Address or token", field), h("button", { type: "submit" }, "Continue")),
    );
  }

  show(nodes) {
    const told = JSON.stringify(nodes);
    if (told === this.told && $("machine").childElementCount) return;
    this.told = told;
    const { node, command } = document.activeElement.dataset;
    const none = h("p", {}, "No node runs here. To lend this machine to a swarm, run ", h("code", {}, "swarmnode run"), ".");
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
      node.reason && h("p", {}, `Reason: ${node.reason}.`),
      h("p", {}, `${node.swarm ?? ""}${node.span ? `, ${units(node.span)}` : ""}, ${plural(node.sessions ?? 0, "session")} now, on ${node.device ?? "?"}.`),
      h("div", { class: "row" }, (COMMANDS[node.state] ?? []).map(([command, label, more]) => this.button(node.node, command, label, more))),
      h("div", { class: "columns" }, part("What it lends", lends.length ? lends : [h("li", {}, "all free resources, at any time")]), part("What it contributed", gave.map((each) => h("li", {}, each)))),
    );
  }

  button(node, command, label, more) {
    const tell = async ({ target }) => {
      if (target.ariaDisabled) return;
      target.ariaDisabled = "true"; // not `disabled`, which would remove its focus
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

/** Return the button of a node for this command; if there is none, the node's first button. */
function buttonOf(node, command) {
  const all = [...$("machine").querySelectorAll("button")].filter((each) => each.dataset.node === node);
  return all.find((each) => each.dataset.command === command) ?? all[0];
}

const part = (title, items) => h("section", {}, h("h3", {}, title), h("ul", {}, items));
