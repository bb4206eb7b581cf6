// Theme: light, dark, or that of the system.

import { $ } from "./dom.js";

const KEY = "swarmnode.theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };
const SIGNS = { auto: "◐", light: "☀", dark: "☾" };

/** Start with the last chosen theme; the button cycles through all three. */
export function startTheme() {
  const show = (theme) => {
    document.documentElement.dataset.theme = theme;
    $("theme").textContent = SIGNS[theme];
    $("theme").setAttribute("aria-label", `Theme: ${theme}. Choose ${NEXT[theme]}`);
    $("theme").title = `Theme: ${theme}`;
  };
  const kept = localStorage.getItem(KEY);
  show(kept in NEXT ? kept : "auto");
  $("theme").addEventListener("click", () => {
    const theme = NEXT[document.documentElement.dataset.theme];
    localStorage.setItem(KEY, theme);
    show(theme);
  });
}
