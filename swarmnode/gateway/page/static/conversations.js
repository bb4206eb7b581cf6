// Conversations, kept in this browser alone. Of many the oldest go.

const KEY = "swarmnode.conversations";
const MOST = 50;
const TITLE_CHARS = 40;

/** All of them, the newest first; none where what is kept cannot be read. */
export function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY));
    return Array.isArray(kept) ? kept.filter((each) => each && typeof each.id === "string" && Array.isArray(each.messages)) : [];
  } catch {
    return [];
  }
}

/** Keep them; where the browser has no room, without the oldest. */
export function save(conversations) {
  for (let most = MOST; most > 0; most = Math.floor(most / 2)) {
    try {
      localStorage.setItem(KEY, JSON.stringify(conversations.filter((each) => each.messages.length).slice(0, most)));
      return;
    } catch {
      // full: with half as many
    }
  }
}

/** A new one. */
export const begin = (system = "") => ({ id: crypto.randomUUID?.() ?? String(Math.random()), system, messages: [] });

/** What it is called: how it begins. */
export const titleOf = (conversation) => conversation.messages.find((each) => each.role === "user")?.content.trim().slice(0, TITLE_CHARS) || "New conversation";
