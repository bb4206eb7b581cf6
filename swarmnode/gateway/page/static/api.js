// Requests to the gateway. The API key and the owner's token are kept as long as the tab and sent only to this gateway.

import { $ } from "./dom.js";

const KEY = "swarmnode.key";
const OWNER = "swarmnode.owner";
const RETRY_MS = 2000;

/** Error response of the gateway, with the API's message. */
export class Refusal extends Error {
  constructor(status, error) {
    super(error?.message ?? `the gateway answered with status ${status}: try again, or see its log`);
    this.status = status;
    this.code = error?.code ?? null;
  }
}

/** Move the owner's token from the address, where it would stay visible, into the tab's storage. */
export function takeOwnerToken() {
  const found = /^#owner=([\w-]+)$/.exec(location.hash);
  if (!found) return;
  sessionStorage.setItem(OWNER, found[1]);
  history.replaceState(null, "", "#chat");
}

/** Store an owner's token that the user pasted, alone or as a part of the address. */
export function keepOwnerToken(text) {
  sessionStorage.setItem(OWNER, text.trim().split("#owner=").at(-1));
}

/** Forget an owner's token that the gateway refuses. */
export const forgetOwnerToken = () => sessionStorage.removeItem(OWNER);

export const isOwner = () => sessionStorage.getItem(OWNER) !== null;

/** Return the response to a request once its headers are there. Throws Refusal; asks the user for a key after status 401. */
export async function ask(path, { body, signal } = {}) {
  for (;;) {
    const headers = { Accept: "application/json, text/event-stream" };
    const key = sessionStorage.getItem(KEY);
    if (key) headers.Authorization = `Bearer ${key}`;
    if (isOwner() && path.startsWith("/api/v1/")) headers["X-Swarmnode-Owner"] = sessionStorage.getItem(OWNER);
    if (body) headers["Content-Type"] = "application/json";
    const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
    if (answer.ok) return answer;
    const told = await answer.json().catch(() => null);
    if (answer.status !== 401) throw new Refusal(answer.status, told?.error);
    await askForKey();
  }
}

export const askJson = async (path, options) => (await ask(path, options)).json();

let asking = null;

/** Ask the user for the API key. Requests that need it at the same time share one dialog. */
function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    const done = () => {
      sessionStorage.setItem(KEY, $("key").value.trim());
      asking = null;
      resolve();
    };
    dialog.addEventListener("close", done, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** Yield the events of a stream as [name, text], until its end. */
export async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const whole = held.split("\n\n");
    held = whole.pop();
    for (const block of whole) {
      const fields = block.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 1).trimStart()]);
      const data = fields.filter(([field]) => field === "data").map(([, text]) => text);
      if (data.length) yield [fields.find(([field]) => field === "event")?.[1] ?? "message", data.join("\n")];
    }
  }
}

/** Call `hear` for every event while the tab is visible. After the stream ends, call `lost` if it failed, and connect again. Returns a function that ends it. */
export function follow(path, hear, lost) {
  let ended = false;
  let current = null;
  const listen = async () => {
    while (!ended && !document.hidden) {
      current = new AbortController();
      try {
        for await (const [name, text] of eventsOf(await ask(path, { signal: current.signal }))) hear(name, JSON.parse(text));
      } catch (error) {
        if (!ended && !document.hidden) lost(error);
      }
      current = null;
      if (!ended && !document.hidden) await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  };
  const look = () => {
    if (document.hidden) current?.abort();
    else if (!current && !ended) listen();
  };
  document.addEventListener("visibilitychange", look);
  listen();
  return () => {
    ended = true;
    current?.abort();
    document.removeEventListener("visibilitychange", look);
  };
}
