// The page: which view is shown, of which swarm.

import { follow, takeOwnerToken } from "./api.js";
import { Chat, models } from "./chat.js";
import { $, fill, h } from "./dom.js";
import { MachineView } from "./machine.js";
import { Swarm, SwarmView } from "./swarm.js";
import { startTheme } from "./theme.js";

const VIEWS = ["chat", "swarm", "machine"];
const MODEL = "swarmnode.model";
const RETRY_MS = 2000;

const views = { swarm: new SwarmView(), machine: new MachineView() };
let swarm = new Swarm();
let stop = () => {};

const chat = new Chat(
  () => swarm,
  () => $("model").value,
);

function showView() {
  const wanted = VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat";
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
  views.swarm.follow(swarm);
  stop = follow(
    `/api/v1/swarms/${encodeURIComponent(name)}/events`,
    (event, told) => {
      notice("");
      followed.hear(event, told);
      views.swarm.refresh();
      chat.refresh();
    },
    (error) => notice(error.status ? error.message : "The gateway does not answer at the moment. Trying again…"),
  );
}

async function start() {
  const names = await models();
  fill($("model"), names.map((name) => h("option", { value: name }, name)));
  const kept = localStorage.getItem(MODEL);
  if (names.includes(kept)) $("model").value = kept;
  $("model").addEventListener("change", () => {
    localStorage.setItem(MODEL, $("model").value);
    followSwarm($("model").value);
  });
  followSwarm($("model").value);
  chat.show();
}

async function startWhenItAnswers() {
  for (;;) {
    try {
      return await start();
    } catch (error) {
      notice(error.status ? error.message : "The gateway does not answer at the moment. Trying again…");
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
startWhenItAnswers();
