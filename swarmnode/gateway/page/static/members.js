// Members of a swarm. The owner of this machine sees them; changing them needs the swarm owner's key on this machine.

import { askJson, isOwner } from "./api.js";
import { $, fill, h, styled } from "./dom.js";
import { hue, plural, until } from "./format.js";
import { offer, shortId, showGiven, showNew, terms } from "./invites.js";
import { askAsOwner, startOwnerDialog } from "./owner-key.js";
import { VirtualGrid } from "./virtual-grid.js";

const LOOK_MS = 10_000;
const when = (unix) => new Date(unix * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
const CARD = { make: () => h("article", { class: "card member" }), width: 270, height: 140 };

export class Members {
  constructor() {
    this.name = null; // of the swarm
    this.isShown = false;
    this.hasOwner = true; // until the gateway denies it
    this.told = null;
    this.owned = false;
    this.locked = true;
    this.members = new VirtualGrid($("members"), { ...CARD, show: (card, each) => this.showMember(card, each), idOf: (each) => each.id, label: "Members" });
    this.invites = new VirtualGrid($("invites"), { ...CARD, show: (card, each) => this.showInvite(card, each), idOf: (each) => each.id, label: "Invites" });
    $("invite-form").addEventListener("submit", (submit) => this.invite(submit));
    startOwnerDialog();
    setInterval(() => this.look(), LOOK_MS);
  }

  /** Show the members of the swarm called `name`. */
  follow(name) {
    if (name === this.name) return;
    this.name = name;
    this.hasOwner = true;
    this.told = null;
    this.offered = null;
    $("members-said").textContent = "";
    fill($("new-invite"));
    this.look();
  }

  /** Note whether the view is visible. */
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
    if (told === this.told) return; // so that the focus stays
    this.told = told;
    this.owned = picture.owned;
    this.locked = picture.locked;
    const isPrivate = picture.membership === "private";
    if (this.offered !== picture.name) offer(picture.roles, picture.usual);
    this.offered = picture.name;
    $("owner-part").hidden = false;
    $("invites-block").hidden = !picture.owned || !isPrivate;
    const who = isPrivate ? "Only invited machines belong to it." : "Everyone may join it; its owner can revoke machines.";
    const where = picture.owned ? "" : " To change members, open the page on the machine with the .swarm file and the owner's key.";
    const online = picture.members.filter((each) => each.state !== "offline").length;
    $("members-note").textContent = `${plural(picture.members.length, "member")}, ${online} online. ${who}${where}`;
    this.members.set(picture.members);
    this.invites.set(picture.invites.toReversed()); // the newest first
  }

  showMember(card, member) {
    const name = member.label;
    const state = member.revoked ? "revoked" : member.state;
    const seen = member.state === "offline" && `seen ${when(member.seen_at)}`;
    const facts = [member.role, member.group && `group ${member.group}`, seen, member.role && until(member.expires_at)];
    const text = facts.filter(Boolean).join(" · ") || "joined without an invite";
    const ids = member.peers.map((each) => each.peer).join(" ");
    fill(
      card,
      h("h3", {}, h("i", { class: "dot", "aria-hidden": "true" }), h("span", { title: ids }, name), h("b", { class: `state ${state}` }, state)),
      h("p", { class: "fine", title: text }, text),
      h("p", { class: "fine", title: ids }, [[member.note, member.name].find((each) => each !== name), ids].filter(Boolean).join(" · ")),
      member.revoked ? null : this.revoker(member.peers[0].peer, name),
    );
    styled(card, { "--hue": hue(member.peers[0].peer) });
  }

  showInvite(card, invite) {
    const title = `the invite ${shortId(invite)}${invite.note ? ` (${invite.note})` : ""} and all who joined by it`;
    showGiven(card, invite, invite.revoked ? null : this.revoker(invite.id, title));
  }

  revoker(who, title) {
    if (!this.owned) return null;
    return h("button", { type: "button", class: "quiet", "aria-label": `Revoke ${title}`, onclick: () => this.revoke(who, title) }, "Revoke");
  }

  async revoke(who, title) {
    const told = await this.command(`Revoke ${title}? You cannot undo this.`, "revocations", { who });
    if (!told) return;
    const heard = told.told ? `${plural(told.told, "machine")} got the news and will pass it on` : "it spreads as soon as other machines are online";
    $("members-said").textContent = `Revoked ${title}: ${heard}.`;
  }

  async invite(submit) {
    submit.preventDefault();
    const made = await this.command("Create an invite", "invites", terms());
    if (!made) return;
    $("invite-form").reset();
    showNew($("new-invite"), made, this.offered);
  }

  /** Send an owner's command and return the response; null if it failed or was cancelled. Then update the view. */
  async command(question, what, body) {
    try {
      const answer = await askAsOwner(question, this.path(what), body, this.locked);
      if (answer) this.look();
      return answer;
    } catch (error) {
      $("members-said").textContent = error.message;
      return null;
    }
  }
}
