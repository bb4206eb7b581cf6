// The page: which view is shown, of which swarm.

import { follow, takeOwnerToken } from "./api.js";
import { Chat, models } from "./chat.js";
import { coverage } from "./coverage.js";
import { $, everyFrame, fill, h } from "./dom.js";
import { Swarm } from "./picture.js";
import { startTheme } from "./theme.js";

const VIEWS = ["chat", "swarm", "machine"];
const MODEL = "swarmnode.model";
const RETRY_MS = 2000;
const AWAY = "The gateway does not answer at the moment. Trying again…";

// Views of which most visits need none: their modules come when one is first looked at.
const MODULES = {
  swarm: () => import("./swarm.js"),
  machine: () => import("./machine.js"),
};
const views = {}; // those that are made
const begun = new Set(); // names of those that are made or come
let swarm = new Swarm();
let stop = () => {};
const parents = new Map(); // of the adapters: the swarms whose models they change

const swarmName = (model) => parents.get(model) ?? model;

const chat = new Chat(
  () => swarm,
  () => $("model").value,
  swarmName,
);

const showCoverage = everyFrame(() => swarm.id && coverage($("coverage"), swarm));

function wantedView() {
  const named = location.hash.slice(1);
  return VIEWS.includes(named) ? named : "chat";
}

/** Make a view, once, as soon as the gateway gives its modules. */
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
      showCoverage();
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
  click.preventDefault(); // the part behind # names views
  $("main").focus();
});
addEventListener("hashchange", () => {
  takeOwnerToken();
  showView();
});
showView();
untilItAnswers(start);
