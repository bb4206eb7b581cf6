// Conversations, stored only in this browser. If there are too many, the oldest are dropped.

const KEY = "swarmnode.conversations";
const MOST = 50;
const TITLE_CHARS = 40;

/** Return all conversations, the newest first; none if the stored data cannot be read. */
export function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY));
    return Array.isArray(kept) ? kept.filter((each) => each && typeof each.id === "string" && Array.isArray(each.messages)) : [];
  } catch {
    return [];
  }
}

/** Store the conversations; if the browser has no room, without the oldest. */
export function save(conversations) {
  for (let most = MOST; most > 0; most = Math.floor(most / 2)) {
    try {
      localStorage.setItem(KEY, JSON.stringify(conversations.filter((each) => each.messages.length).slice(0, most)));
      return;
    } catch {
      // no room: try half as many
    }
  }
}

/** Return a new conversation. */
export const begin = (system = "") => ({ id: crypto.randomUUID?.() ?? String(Math.random()), system, messages: [] });

/** Return the title of a conversation: its beginning. */
export const titleOf = (conversation) => conversation.messages.find((each) => each.role === "user")?.content.trim().slice(0, TITLE_CHARS) || "New conversation";
