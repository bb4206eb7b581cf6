// Invites of a private swarm: a new one, as a line and a QR code, and the issued ones.

import { $, announce, fill, h, s } from "./dom.js";
import { plural, until } from "./format.js";

const SHOWN_CHARS = 8; // of an id
const ROLES = { volunteer: "volunteer, to lend and use it", client: "client, to use it", bootstrap: "bootstrap peer", trainer: "trainer, to lead trainings" };
const USES = { volunteer: ["run", "lends the machine"], client: ["serve", "prints the address of a page to chat"], bootstrap: ["host --door-only", "lets others in"], trainer: ["run", "takes part in trainings"] };

/** Return the short id of an invite. */
export const shortId = (invite) => invite.id.slice(0, SHOWN_CHARS);

/** Offer the roles of a swarm and the terms that `swarmnode invite` takes by itself. */
export function offer(roles, usual) {
  const offered = Object.keys(ROLES).filter((role) => roles.includes(role));
  fill($("invite-role"), ...offered.map((role) => h("option", { value: role, selected: role === usual.role }, ROLES[role])));
  for (const option of $("invite-life").options) option.defaultSelected = option.value === String(usual.life_s ?? "");
  $("invite-uses").defaultValue = usual.uses || "";
  $("invite-form").reset();
}

/** Return the form's values in the gateway's format. */
export function terms() {
  const life = $("invite-life").value;
  return {
    role: $("invite-role").value,
    life_s: life ? Number(life) : null,
    uses: Number($("invite-uses").value || 0),
    peer: $("invite-peer").value.trim(),
    group: $("invite-group").value.trim(),
    note: $("invite-note").value.trim(),
  };
}

/** Show a new invite to the swarm called `name`, and what the friend does with it. It is not stored, so this is the only time. */
export function showNew(element, made, name) {
  const line = h("textarea", { rows: "5", readonly: true, spellcheck: "false", value: made.invite, onfocus: () => line.select() });
  const copy = async () => {
    line.focus();
    await navigator.clipboard?.writeText(made.invite);
    announce("Copied the invite.");
  };
  const shut = () => {
    fill(element);
    $("invite-make").focus();
  };
  fill(
    element,
    made.qr && s("svg", { class: "qr", viewBox: `0 0 ${made.qr.size} ${made.qr.size}`, role: "img", "aria-label": "The invite as a QR code" }, s("path", { d: made.qr.path })),
    h(
      "div",
      {},
      h("h3", {}, `Invite for a ${made.role}`),
      h("p", {}, `${whom(made)} It is not stored: hand it out before you close this.`),
      h("label", {}, "Invite", line),
      h("p", {}, "Your friend installs swarmnode and types:"),
      h("ol", {}, ...steps(made, name)),
      h("div", { class: "row" }, h("button", { type: "button", onclick: copy }, "Copy"), h("button", { type: "button", class: "quiet", onclick: shut }, "Close")),
    ),
  );
  line.focus();
}

/** Say who can join by an invite. */
function whom(made) {
  if (made.peer) return "Only the machine with this id can join by it.";
  if (made.uses === null) return "Anyone with this invite can join.";
  return made.uses === 1 ? "The first machine that uses this invite joins, for all it does." : `The first ${made.uses} machines that use this invite join.`;
}

/** Return the friend's commands as list items. */
function steps(made, name) {
  const [command, effect] = USES[made.role] ?? USES.client;
  const swarm = /^[\w.-]+$/u.test(name) ? name : `'${name.replaceAll("'", "'\\''")}'`;
  return [
    h("li", {}, h("code", {}, "swarmnode join"), " and pastes the invite when asked"),
    h("li", {}, h("code", {}, `swarmnode ${command} ${swarm}`), `, which ${effect}`),
  ];
}

/** Show an issued invite on a card; `revoke` is a button, or null. */
export function showGiven(card, invite, revoke) {
  const used = invite.uses === null ? `used by ${plural(invite.used, "machine")}` : `used by ${invite.used} of ${plural(invite.uses, "machine")}`;
  const only = invite.peer && `for ${invite.peer.slice(-SHOWN_CHARS)}`;
  const facts = [used, only, invite.group && `group ${invite.group}`, until(invite.expires_at)].filter(Boolean).join(" · ");
  fill(
    card,
    h("h3", {}, h("span", { title: invite.id }, invite.note || shortId(invite)), h("b", { class: "state" }, invite.revoked ? "revoked" : invite.role)),
    h("p", { class: "fine", title: facts }, facts),
    h("p", { class: "fine" }, `invite ${shortId(invite)}`),
    revoke,
  );
}
