// Who belongs to a swarm, for its owner: seen by whoever owns this machine, changed with the owner's key that lies on it.

import { askJson, isOwner } from "./api.js";
import { $, fill, h, styled } from "./dom.js";
import { hue, nameOf, plural, until } from "./format.js";
import { shortId, showGiven, showNew, terms } from "./invites.js";
import { askAsOwner, startOwnerDialog } from "./owner-key.js";
import { VirtualGrid } from "./virtual-grid.js";

const LOOK_MS = 10_000;
const CARD = { make: () => h("article", { class: "card member" }), width: 270, height: 140 };

export class Members {
  constructor() {
    this.name = null; // of the swarm
    this.isShown = false;
    this.hasOwner = true; // until the gateway says otherwise
    this.told = null;
    this.owned = false;
    this.members = new VirtualGrid($("members"), { ...CARD, show: (card, each) => this.showMember(card, each), idOf: (each) => each.peer, label: "Members" });
    this.invites = new VirtualGrid($("invites"), { ...CARD, show: (card, each) => this.showInvite(card, each), idOf: (each) => each.id, label: "Invites" });
    $("invite-form").addEventListener("submit", (submit) => this.invite(submit));
    startOwnerDialog();
    setInterval(() => this.look(), LOOK_MS);
  }

  /** Show those of the swarm that is called so here. */
  follow(name) {
    if (name === this.name) return;
    this.name = name;
    this.hasOwner = true;
    this.told = null;
    $("members-said").textContent = "";
    fill($("new-invite"));
    this.look();
  }

  /** Whether the view is looked at. */
  shown(isShown) {
    this.isShown = isShown;
    this.look();
  }

  async look() {
    if (!this.isShown || document.hidden || !this.name) return;
    if (!isOwner() || !this.hasOwner) return this.hide();
    const { name } = this;
    try {
      const told = await askJson(this.path("members"));
      if (name === this.name) this.show(told);
    } catch (error) {
      if (error.status === 400) this.hasOwner = false;
      if (error.status) this.hide();
    }
  }

  hide() {
    $("owner-part").hidden = true;
    this.told = null;
  }

  path(what) {
    return `/api/v1/swarms/${encodeURIComponent(this.name)}/${what}`;
  }

  show(picture) {
    const told = JSON.stringify(picture);
    if (told === this.told) return; // who has the focus keeps it
    this.told = told;
    this.owned = picture.owned;
    const isPrivate = picture.membership === "private";
    $("owner-part").hidden = false;
    $("invites-block").hidden = !picture.owned || !isPrivate;
    const who = isPrivate ? "Only those whom its owner invited belong to it." : "Everybody may join it; its owner may revoke peers.";
    const where = picture.owned ? "" : " That is done where the .swarm file and the owner's key lie, which is not here.";
    $("members-note").textContent = `${plural(picture.members.length, "member")} seen. ${who}${where}`;
    this.members.set(picture.members);
    this.invites.set(picture.invites.toReversed()); // the newest first
  }

  showMember(card, member) {
    const facts = [member.role, member.group && `group ${member.group}`, member.role && until(member.expires_at)];
    const text = facts.filter(Boolean).join(" · ") || "came without an invite";
    fill(
      card,
      h("h3", {}, h("i", { class: "dot", "aria-hidden": "true" }), h("span", { title: member.peer }, nameOf(member)), h("b", { class: `state ${member.state}` }, member.state)),
      h("p", { class: "fine", title: text }, text),
      h("p", { class: "fine", title: member.peer }, member.peer),
      this.revoker(member.peer, nameOf(member)),
    );
    styled(card, { "--hue": hue(member.peer) });
  }

  showInvite(card, invite) {
    const title = `the invite ${shortId(invite)}${invite.note ? ` (${invite.note})` : ""} and all who came by it`;
    showGiven(card, invite, invite.revoked ? null : this.revoker(invite.id, title));
  }

  revoker(who, title) {
    if (!this.owned) return null;
    return h("button", { type: "button", class: "quiet", "aria-label": `Revoke ${title}`, onclick: () => this.revoke(who, title) }, "Revoke");
  }

  async revoke(who, title) {
    const told = await this.command(`Revoke ${title}? It cannot be taken back.`, "revocations", { who });
    if (!told) return;
    const heard = told.told ? `${plural(told.told, "peer")} heard it, and others will from them` : "it spreads as soon as others are online";
    $("members-said").textContent = `Revoked ${title}: ${heard}.`;
  }

  async invite(submit) {
    submit.preventDefault();
    const made = await this.command("Make an invite", "invites", terms());
    if (!made) return;
    $("invite-form").reset();
    showNew($("new-invite"), made);
  }

  /** The answer, or null. What is shown is looked at anew. */
  async command(question, what, body) {
    try {
      const answer = await askAsOwner(question, this.path(what), body);
      if (answer) this.look();
      return answer;
    } catch (error) {
      $("members-said").textContent = error.message;
      return null;
    }
  }
}
