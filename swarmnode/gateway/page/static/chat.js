// Chat with a swarm: messages while they are written, and beside them the machines that write.

import { ask, askJson, eventsOf, follow } from "./api.js";
import { begin, load, save, titleOf } from "./conversations.js";
import { $, announce, everyFrame, fill, h, keepFocus, refill } from "./dom.js";
import { pace, plural } from "./format.js";
import { markdown } from "./markdown.js";
import { readiness, writersText } from "./readiness.js";
import { otherTask } from "./tasks.js";
import { Writing, badge, showWriting } from "./writers.js";

const NEAR_END_PX = 80;
const PHONE = matchMedia("(max-width: 40rem)"); // as in chat.css
const CHAT = "/v1/chat/completions";
const TEXT = "/v1/completions"; // for models without a chat template

export class Chat {
  /** `swarmOf()` returns the state of the chosen swarm, `model()` the model's name, `swarmName(model)` its swarm's name. */
  constructor(swarmOf, model, swarmName) {
    this.swarmOf = swarmOf;
    this.model = model;
    this.swarmName = swarmName;
    this.conversations = load();
    this.current = this.conversations[0] ?? begin();
    this.writing = null;
    this.abort = null;
    this.task = null; // of the swarm; null until its state is known
    this.showLast = everyFrame(() => this.showLastNow());
    $("new-chat").addEventListener("click", () => this.open(begin($("system").value)));
    $("composer").addEventListener("submit", (submit) => {
      submit.preventDefault();
      this.say($("prompt").value);
    });
    $("stop").addEventListener("click", () => this.abort?.abort());
    $("prompt").addEventListener("keydown", (key) => this.typed(key));
    $("prompt").addEventListener("input", () => this.fit());
    $("system").addEventListener("change", () => {
      this.current.system = $("system").value;
      this.keep();
    });
    PHONE.addEventListener("change", () => this.fold());
    this.fold();
    document.addEventListener("keydown", (key) => key.key === "Escape" && !document.querySelector("dialog[open]") && this.abort?.abort());
    this.open(this.current);
  }

  typed(key) {
    if (key.key !== "Enter" || key.shiftKey || key.isComposing) return;
    key.preventDefault();
    this.say($("prompt").value);
  }

  /** Fit the input's height to its lines. */
  fit() {
    $("prompt").rows = Math.min(8, $("prompt").value.split("\n").length);
  }

  /** Fold the list of conversations away where there is little room. */
  fold() {
    $("history").open = !PHONE.matches;
  }

  open(conversation) {
    this.abort?.abort();
    this.fold();
    this.current = conversation;
    this.writing = null;
    $("system").value = conversation.system ?? "";
    this.show();
    this.refresh();
  }

  keep() {
    this.conversations = [this.current, ...this.conversations.filter((each) => each.id !== this.current.id)];
    save(this.conversations);
    this.showTalks();
  }

  forget(conversation) {
    this.conversations = this.conversations.filter((each) => each.id !== conversation.id);
    save(this.conversations);
    if (conversation.id === this.current.id) this.open(this.conversations[0] ?? begin());
    this.showTalks();
  }

  /** Show the new state of the swarm. */
  refresh() {
    const { task = null } = this.swarmOf();
    if (task !== this.task) {
      this.task = task;
      this.show();
    }
    this.welcome();
    showWriting($("writers"), this.writing, this.swarmOf(), this.abort !== null);
  }

  // -- asking

  async say(text) {
    if (!text.trim() || this.abort) return;
    this.current.messages.push({ role: "user", content: text });
    $("prompt").value = "";
    this.fit();
    await this.answer();
  }

  /** Replace the last answer by a new one. */
  async regenerate() {
    if (this.abort) return;
    while (this.current.messages.at(-1)?.role === "assistant") this.current.messages.pop();
    await this.answer();
  }

  async answer() {
    const { current } = this;
    const message = { role: "assistant", content: "", model: this.model() };
    current.messages.push(message);
    this.abort = new AbortController();
    this.writing = new Writing();
    this.show();
    try {
      await this.read(message, this.abort.signal);
    } catch (error) {
      if (error.name === "AbortError") message.ended = "stopped";
      else message.error = error.message;
    }
    this.stopHearing?.();
    this.stopHearing = null;
    this.abort = null;
    Object.assign(message, this.writing.summary());
    announce(message.error ? `Failed: ${message.error}` : "The answer is complete.");
    if (current === this.current) this.show();
    this.keep();
  }

  async read(message, signal) {
    const earlier = this.current.messages.slice(0, -1).map(({ role, content }) => ({ role, content }));
    const system = this.current.system?.trim();
    const messages = system ? [{ role: "system", content: system }, ...earlier] : earlier;
    const drawn = { model: message.model, stream: true, temperature: Number($("temperature").value), max_tokens: Number($("max-tokens").value) };
    let answer;
    try {
      answer = await ask(CHAT, { body: { ...drawn, messages }, signal });
    } catch (error) {
      if (error.code !== "no_chat_template") throw error;
      answer = await ask(TEXT, { body: { ...drawn, prompt: earlier.at(-1).content }, signal });
      message.note = "This model cannot chat: it continues your text.";
    }
    for await (const [name, data] of eventsOf(answer)) {
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (name === "error" || told.error) throw new Error(told.error?.message ?? "the swarm failed: try again");
      if (!message.trace) this.hear(message, told.id.split("-").at(-1));
      message.content += told.choices[0]?.delta?.content ?? told.choices[0]?.text ?? "";
      message.ended = told.choices[0]?.finish_reason ?? message.ended;
      this.showLast();
    }
  }

  /** Follow the machines that write the message. */
  hear(message, trace) {
    message.trace = trace;
    const writing = this.writing;
    const stop = follow(
      `/api/v1/swarms/${encodeURIComponent(this.swarmName(message.model))}/sessions/${trace}/events`,
      (name, told) => {
        if (name === "over") return stop();
        writing.hear(told, this.swarmOf());
        message.tokens = told.tokens;
        message.tokens_per_s = told.tokens_per_s;
        if (writing === this.writing) this.refresh();
      },
      () => stop(), // the session has ended
    );
    this.stopHearing = stop;
  }

  // -- showing

  show() {
    keepFocus(
      () => this.showAll(),
      () => $(this.abort ? "stop" : "prompt"),
    );
  }

  showAll() {
    this.showTalks();
    const last = this.current.messages.length - 1;
    const said = this.current.messages.map((message, index) => this.article(message, index === last));
    const other = otherTask(this.task);
    fill($("messages"), said.length ? said : h("div", { class: "welcome" }));
    this.welcome();
    scrollToEnd();
    $("composer").hidden = $("writing").hidden = other !== null;
    $("no-chat").hidden = other === null || !said.length;
    $("no-chat").textContent = other === null ? "" : `${this.model()} cannot chat. ${other}`;
    $("send").hidden = this.abort !== null;
    $("stop").hidden = this.abort === null;
    this.refresh();
  }

  showTalks() {
    const talks = this.conversations.map((each) =>
      h(
        "li",
        {},
        h("button", { type: "button", class: "quiet", "aria-current": each.id === this.current.id && "true", onclick: () => this.open(each) }, titleOf(each)),
        h("button", { type: "button", class: "quiet forget", "aria-label": `Delete: ${titleOf(each)}`, onclick: () => this.forget(each) }, "×"),
      ),
    );
    keepFocus(
      () => fill($("talks"), talks),
      () => $("talks").querySelector("[aria-current]") ?? $("new-chat"),
    );
  }

  /** Show the beginning of a conversation, if it has no message yet. */
  welcome() {
    const element = $("messages").querySelector(".welcome");
    if (!element) return;
    const swarm = this.swarmOf();
    const told = [this.model(), otherTask(this.task), ...(swarm.id ? [readiness(swarm).mood, writersText(swarm)] : [])];
    refill(element, told, () => welcome(...told));
  }

  /** Update only the message in progress. */
  showLastNow() {
    const element = scroller();
    const follows = element.scrollHeight - element.scrollTop - element.clientHeight < NEAR_END_PX;
    const last = this.current.messages.at(-1);
    const article = $("messages").lastElementChild;
    if (last?.role !== "assistant" || !article) return;
    fill(article.querySelector(".text"), markdown(last.content));
    if (follows) scrollToEnd();
  }

  article(message, isLast) {
    const isUser = message.role === "user";
    const text = h("div", { class: "text" }, isUser ? h("p", { class: "plain" }, message.content) : markdown(message.content));
    const isWriting = isLast && this.abort !== null;
    return h(
      "article",
      { class: `message ${message.role}${isWriting ? " writing" : ""}`, "aria-label": isUser ? "You" : "The swarm" },
      message.note && h("p", { class: "fine" }, message.note),
      text,
      message.error && h("p", { class: "error box" }, message.error),
      !isUser && !isWriting && this.foot(message, isLast),
    );
  }

  foot(message, isLast) {
    const facts = [
      message.tokens && `${plural(message.tokens, "token")}, ${pace(message.tokens_per_s)}`,
      message.ended === "length" && "maximum of tokens reached",
      message.ended === "stopped" && "stopped",
    ].filter(Boolean);
    return h(
      "footer",
      {},
      (message.machines ?? []).map(({ peer, name }) => badge({ peers: new Map([[peer, { peer, name }]]) }, peer)),
      h("span", { class: "fine" }, facts.join(" · ")),
      (message.happened ?? []).map((each) => h("p", { class: "fine happened" }, each)),
      h(
        "span",
        { class: "actions" },
        h("button", { type: "button", class: "quiet", onclick: () => navigator.clipboard.writeText(message.content) }, "Copy"),
        isLast && h("button", { type: "button", class: "quiet", onclick: () => this.regenerate() }, "Regenerate"),
      ),
    );
  }
}

/** Return the parts of the beginning. `other` describes the use of a model that cannot chat, or is null; `mood` is that of the
 * swarm, and `writers` a sentence about the machines that would write. */
const welcome = (model, other, mood, writers) => [
  h("p", { class: "large" }, other ? `${model} cannot chat.` : `You are chatting with ${model || "a swarm"}.`),
  other && h("p", {}, other),
  !other && writers && h("p", {}, writers),
  !other && mood === "lacking" && h("p", {}, "It cannot answer yet. ", h("a", { href: "#swarm" }, "See what is missing"), "."),
];

/** Return the element that scrolls the messages: on a phone the whole page. */
const scroller = () => (PHONE.matches ? document.scrollingElement : $("messages"));

function scrollToEnd() {
  if (!$("view-chat").hidden) scroller().scrollTop = scroller().scrollHeight;
}

/** Return the models; `parent` is the model that an adapter changes, else null. */
export const models = async () => (await askJson("/v1/models")).data;
