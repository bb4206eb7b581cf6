// Limits and rules of a node as a form. Names, values and checks are those of the command line; the node describes them.

import { askJson } from "./api.js";
import { fill, h } from "./dom.js";

const GROUPS = [
  ["How much", ["memory", "disk", "cpu_share", "max_upload", "max_download", "monthly", "month_day"]],
  ["When", ["only_idle", "hours", "days", "on_mains", "unmetered"]],
  ["Beside other programs", ["exclusive", "max_load", "max_pressure", "max_gpu_memory", "max_gpu_load"]],
  ["Heat", ["max_gpu_temperature", "max_gpu_power"]],
];
const LABELS = {
  memory: "Memory",
  disk: "Disk",
  cpu_share: "Share of the time",
  max_upload: "Upload",
  max_download: "Download",
  monthly: "Traffic a month",
  month_day: "First day of that month",
  only_idle: "Only after idle time",
  hours: "Hours",
  days: "Days",
  on_mains: "Not on battery",
  unmetered: "Not on a metered connection",
  exclusive: "Programs that come first",
  max_load: "CPU for other programs",
  max_pressure: "Waiting for memory",
  max_gpu_memory: "GPU memory for other programs",
  max_gpu_load: "GPU time for other programs",
  max_gpu_temperature: "GPU temperature (°C)",
  max_gpu_power: "GPU power (W)",
};
const EXAMPLES = { SIZE: "6GB", RATE: "8Mbit", SHARE: "50%", PROGRAM: "blender, steam", "°C": "75", WATTS: "200" };

export class LendingOptions {
  /** Form for the node called `name`. `changed()` is called after a change. */
  constructor(name, changed) {
    this.path = `/api/v1/machine/${encodeURIComponent(name)}/options`;
    this.changed = changed;
    this.told = [];
    this.opener = h("button", { type: "button", class: "second", "aria-expanded": "false", onclick: () => this.toggle() }, "Edit");
    this.fields = h("div", { class: "groups" });
    this.said = h("p", { role: "status" });
    this.wrong = h("p", { class: "error", role: "alert" });
    const close = h("button", { type: "button", class: "second", onclick: () => this.toggle() }, "Close");
    this.save = h("button", { type: "submit" }, "Save");
    this.element = h("form", { class: "options", hidden: true, onsubmit: (submit) => this.submit(submit) }, this.fields, this.wrong, this.said, h("div", { class: "row" }, this.save, close));
  }

  async toggle() {
    const opens = this.element.hidden;
    this.element.hidden = !opens;
    this.opener.ariaExpanded = String(opens);
    if (!opens) return this.opener.focus();
    this.say("");
    try {
      this.show((await askJson(this.path)).options);
      this.fields.querySelector("input")?.focus();
    } catch (error) {
      fill(this.fields);
      this.say("", error.message);
    }
    this.save.hidden = !this.told.length;
  }

  show(options) {
    this.told = options;
    const known = new Map(options.map((option) => [option.name, option]));
    const groups = GROUPS.map(([title, names]) => [title, names.filter((name) => known.has(name)).map((name) => field(known.get(name)))]);
    fill(
      this.fields,
      groups.filter(([, fields]) => fields.length).map(([title, fields]) => h("fieldset", {}, h("legend", {}, title), fields)),
    );
  }

  async submit(submit) {
    submit.preventDefault();
    const changes = Object.fromEntries(this.told.map((option) => [option.name, this.valueOf(option)]).filter(([name, value]) => !same(value, this.before(name))));
    if (!Object.keys(changes).length) return this.say("Nothing has changed.");
    this.element.inert = true;
    this.fields.querySelector("[aria-invalid]")?.removeAttribute("aria-invalid");
    let wrong = null;
    try {
      const answer = await askJson(this.path, { body: { options: changes } });
      this.show(answer.options);
      this.say(answer.told);
      this.changed();
    } catch (error) {
      this.say("", error.message);
      wrong = this.inputOf(/^-*([\w-]+)/.exec(error.message)?.[1].replaceAll("-", "_"));
      wrong?.setAttribute("aria-invalid", "true");
    }
    this.element.inert = false;
    (wrong ?? this.save).focus();
  }

  /** Return the field of the option called `name`; null if there is none. */
  inputOf(name) {
    return [...this.fields.querySelectorAll("input")].find((input) => input.name === name) ?? null;
  }

  before(name) {
    return this.told.find((option) => option.name === name).value;
  }

  valueOf({ name, kind }) {
    const input = this.inputOf(name);
    if (kind === "yes") return input.checked;
    return kind === "list" ? input.value.split(",").map((each) => each.trim()).filter(Boolean) : input.value.trim();
  }

  say(text, wrong = "") {
    this.said.textContent = text;
    this.wrong.textContent = wrong;
  }
}

const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);

function field({ name, kind, value, example, help, origin, default: usual }) {
  const id = `option-${name}-${crypto.randomUUID?.() ?? Math.random()}`;
  const note = h("span", { class: "fine", id }, [help.replace("Repeatable.", "Put commas between several."), origin && `Now from ${origin}.`].filter(Boolean).join(" "));
  const label = LABELS[name] ?? name;
  if (kind === "yes") {
    const box = h("input", { type: "checkbox", name, "aria-describedby": id });
    box.checked = value === true;
    return h("div", { class: "field" }, h("label", { class: "check" }, box, label), note);
  }
  const text = Array.isArray(value) ? value.join(", ") : value;
  const input = h("input", { name, value: text, placeholder: usual || `e.g. ${EXAMPLES[example] ?? example}`, autocomplete: "off", spellcheck: "false", maxlength: kind === "list" ? 1000 : 100, "aria-describedby": id });
  return h("div", { class: "field" }, h("label", {}, label, input), note);
}
