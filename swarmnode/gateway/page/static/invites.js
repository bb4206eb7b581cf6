// Invites of a private swarm: a new one, as a line and a QR code, and the issued ones.

import { $, announce, fill, h, s } from "./dom.js";
import { until } from "./format.js";

const SHOWN_CHARS = 8; // of an id

/** Return the short id of an invite. */
export const shortId = (invite) => invite.id.slice(0, SHOWN_CHARS);

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

/** Show a new invite. It is not stored, so this is the only time. */
export function showNew(element, made) {
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
      h("p", {}, "Anyone with this invite can join. It is not stored: hand it out before you close this."),
      h("label", {}, "Invite", line),
      h("div", { class: "row" }, h("button", { type: "button", onclick: copy }, "Copy"), h("button", { type: "button", class: "quiet", onclick: shut }, "Close")),
    ),
  );
  line.focus();
}

/** Show an issued invite on a card; `revoke` is a button, or null. */
export function showGiven(card, invite, revoke) {
  const used = invite.uses === null ? `used ${invite.used} times` : `used ${invite.used} of ${invite.uses} times`;
  const whom = invite.peer ? `for ${invite.peer.slice(-SHOWN_CHARS)}` : "for anyone";
  const facts = [used, whom, invite.group && `group ${invite.group}`, until(invite.expires_at)].filter(Boolean).join(" · ");
  fill(
    card,
    h("h3", {}, h("span", { title: invite.id }, shortId(invite)), h("b", { class: "state" }, invite.revoked ? "revoked" : invite.role)),
    h("p", { class: "fine", title: facts }, facts),
    h("p", { class: "fine", title: invite.note }, invite.note || "no note"),
    revoke,
  );
}
