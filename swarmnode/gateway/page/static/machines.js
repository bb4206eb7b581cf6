// Machines of a swarm, as cards.

import { $, fill, h, styled } from "./dom.js";
import { byId, bytes, duration, hue, layersOf, nameOf, pace, percent, plural, rate } from "./format.js";
import { VirtualGrid } from "./virtual-grid.js";

const NAMES = new Intl.Collator();
const ORDERS = {
  span: (one, other) => one.span[0] - other.span[0] || one.span[1] - other.span[1],
  name: (one, other) => NAMES.compare(nameOf(one), nameOf(other)),
  speed: (one, other) => other.decode_units_per_s - one.decode_units_per_s,
  since: (one, other) => one.since - other.since,
};

export class Machines {
  constructor(element) {
    this.peers = new Map();
    this.writeText = true; // else there are no caches, and so no free room to show
    this.grid = new VirtualGrid(element, {
      make: () => h("article", { class: "card machine" }),
      show: (card, peer) => showMachine(card, peer, this),
      idOf: (peer) => peer.peer,
      width: 270,
      height: 172,
      label: "Machines",
    });
    $("find").addEventListener("input", () => this.arrange());
    $("order").addEventListener("change", () => this.arrange());
  }

  /** Show the machines of a swarm; `writeText` is false if its model does something else. */
  set(swarm, { writeText }) {
    Object.assign(this, { peers: swarm.peers, layers: swarm.units, writeText });
    this.arrange();
  }

  arrange() {
    const words = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (peer) => `${nameOf(peer)} ${peer.peer} ${peer.device} ${peer.state} ${peer.reached}`.toLowerCase();
    const all = [...this.peers.values()];
    const found = words.length ? all.filter((peer) => words.every((word) => text(peer).includes(word))) : all;
    const order = ORDERS[$("order").value];
    this.grid.set(found.sort((one, other) => order(one, other) || byId(one, other)));
  }
}

function showMachine(card, peer, { writeText, layers }) {
  const count = peer.span[1] - peer.span[0];
  const room = writeText && peer.state === "ready" && peer.cache_tokens_free > 0 && `room for ${plural(peer.cache_tokens_free, "token")}`;
  const busy = peer.sessions ? `${plural(peer.sessions, writeText ? "text" : "pass", writeText ? "texts" : "passes")} in work` : "idle";
  const speed = count && (peer.decode_units_per_s || peer.training_units_per_s) / count;
  const links = peer.up_bps || peer.down_bps ? [`↑ ${rate(peer.up_bps)}`, `↓ ${rate(peer.down_bps)}`] : ["bandwidth not measured yet"];
  const facts = [
    [peer.device, peer.memory_bytes && `${bytes(peer.memory_bytes)} lent`, peer.number_format],
    [speed && `${pace(speed)} through its ${plural(count, "layer")}`],
    [busy, room],
    [...links, peer.reached !== "unknown" && peer.reached],
    [`here for ${duration(Date.now() / 1000 - peer.since)}`, peer.standing === "good" ? peer.trust > 0 && `audited, trust ${percent(peer.trust)}` : `${peer.standing}: ${peer.findings.at(-1) ?? ""}`],
  ];
  const lines = facts.map((each) => each.filter(Boolean).join(" · ")).filter(Boolean);
  fill(
    card,
    h("h3", {}, h("i", { class: "dot", "aria-hidden": "true" }), h("span", { title: peer.peer }, nameOf(peer)), h("b", { class: `state ${peer.state}` }, peer.state)),
    h("p", {}, count > 0 ? layersOf(peer.span, layers) : "holds no layers"),
    lines.map((line) => h("p", { class: "fine", title: line }, line)),
  );
  styled(card, { "--hue": hue(peer.peer) });
}
