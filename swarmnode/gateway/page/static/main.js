// The page: the chosen view and the chosen swarm.

import { follow, takeOwnerToken } from "./api.js";
import { Chat, models } from "./chat.js";
import { coverage } from "./coverage.js";
import { $, everyFrame, fill, h, refill } from "./dom.js";
import { Swarm } from "./picture.js";
import { readiness } from "./readiness.js";
import { startTheme } from "./theme.js";

const VIEWS = ["chat", "swarm", "machine"];
const MODEL = "swarmnode.model";
const RETRY_MS = 2000;
const AWAY = "The gateway does not answer. Trying again…";

// Most visits need none of these views: each module is loaded when its view is first opened.
const MODULES = {
  swarm: () => import("./swarm.js"),
  machine: () => import("./machine.js"),
};
const views = {}; // created views
const begun = new Set(); // names of views that are created or loading
let swarm = new Swarm();
let stop = () => {};
const parents = new Map(); // by adapter: the swarm whose model it changes

const swarmName = (model) => parents.get(model) ?? model;

const chat = new Chat(
  () => swarm,
  () => $("model").value,
  swarmName,
);

const showReadiness = everyFrame(() => {
  if (!swarm.id) return;
  const { mood, head } = readiness(swarm);
  coverage($("coverage"), swarm, head);
  refill($("readiness"), [mood, head], () => [h("i", { class: "lamp", "aria-hidden": "true" }), h("span", {}, head)]);
  $("readiness").className = `readiness ${mood}`;
});

function wantedView() {
  const named = location.hash.slice(1);
  return VIEWS.includes(named) ? named : "chat";
}

/** Create a view once, as soon as the gateway provides its modules. */
async function make(name) {
  if (begun.has(name)) return;
  begun.add(name);
  const { default: View } = await untilItAnswers(MODULES[name]);
  views[name] = new View();
  views[name].follow?.(swarm);
  views[name].shown(name === wantedView());
}

function showView() {
  const wanted = wantedView();
  if (wanted in MODULES) make(wanted);
  for (const view of VIEWS) {
    $(`view-${view}`).hidden = view !== wanted;
    views[view]?.shown(view === wanted);
  }
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${wanted}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function notice(text) {
  $("notice").hidden = !text;
  $("notice").textContent = text;
}

function followSwarm(name) {
  stop();
  swarm = new Swarm();
  const followed = swarm;
  views.swarm?.follow(swarm);
  stop = follow(
    `/api/v1/swarms/${encodeURIComponent(name)}/events`,
    (event, told) => {
      notice("");
      followed.hear(event, told);
      showReadiness();
      views.swarm?.refresh();
      chat.refresh();
    },
    (error) => notice(error.status ? error.message : AWAY),
  );
}

async function start() {
  const served = await models();
  for (const { id, parent } of served) if (parent) parents.set(id, parent);
  fill($("model"), served.map(({ id, parent }) => h("option", { value: id }, parent ? `${id} (adapter)` : id)));
  const kept = localStorage.getItem(MODEL);
  if (served.some(({ id }) => id === kept)) $("model").value = kept;
  $("model").addEventListener("change", () => {
    localStorage.setItem(MODEL, $("model").value);
    followSwarm(swarmName($("model").value));
  });
  followSwarm(swarmName($("model").value));
  chat.show();
}

async function untilItAnswers(work) {
  for (;;) {
    try {
      return await work();
    } catch (error) {
      notice(error.status ? error.message : AWAY);
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
}

takeOwnerToken();
startTheme();
document.querySelector(".skip").addEventListener("click", (click) => {
  click.preventDefault(); // the part after # names a view
  $("main").focus();
});
addEventListener("hashchange", () => {
  takeOwnerToken();
  showView();
});
showView();
untilItAnswers(start);
