// Texts that this gateway has in progress, with the machines that write them.

import { fill, h, refill } from "./dom.js";
import { number, pace, plural } from "./format.js";
import { KeptElements } from "./kept-elements.js";
import { badge } from "./writers.js";

export class Sessions {
  constructor(element) {
    this.nothing = h("p", { class: "fine" }, "None at this gateway.");
    this.list = h("ul", { class: "sessions" });
    this.rows = new KeptElements(this.list, { make: () => h("li"), show: showSession, idOf: ({ session }) => session.trace });
    fill(element, this.nothing, this.list);
  }

  show(swarm) {
    this.nothing.hidden = swarm.sessions.length > 0;
    this.list.hidden = !this.nothing.hidden;
    this.rows.set(swarm.sessions.map((session) => ({ session, swarm })));
  }
}

function showSession(row, { session, swarm }) {
  const names = session.route.map((hop) => swarm.peers.get(hop.peer)?.name);
  refill(row, [session.route, names], () => [
    session.route.map((hop) => badge(swarm, hop.peer, h("small", {}, ` ${hop.span[0]}–${hop.span[1] - 1}`))),
    h("span", { class: "fine" }),
  ]);
  const moved = session.reroutes ? `, moved ${plural(session.reroutes, "time")}` : "";
  const progress = `${plural(session.tokens, "token")}, ${pace(session.tokens_per_s)}${moved}${guesses(session.drafts)}`;
  if (row.lastChild.textContent !== progress) row.lastChild.textContent = progress;
}

/** Say how many guessed tokens were right, by proposer. */
function guesses(drafts) {
  const told = Object.entries(drafts).map(([proposer, { drafted, accepted }]) => `${proposer} ${number(accepted)} of ${number(drafted)}`);
  return told.length ? `; right guesses: ${told.join(", ")}` : "";
}
