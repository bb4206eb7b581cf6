// The owner's key: its password is asked for each time, goes with one request, and is kept nowhere.

import { askJson } from "./api.js";
import { $ } from "./dom.js";

/** The answer to what the owner wants, once the password opens the key; null where they think better of it. */
export function askAsOwner(question, path, body) {
  const dialog = $("owner-dialog");
  const form = $("owner-form");
  const password = $("owner-password");
  let answer = null;
  const send = async (submit) => {
    submit.preventDefault();
    form.inert = true;
    $("owner-error").textContent = "";
    answer = askJson(path, { body: { ...body, password: password.value } });
    try {
      await answer;
      dialog.close();
    } catch (error) {
      answer = null;
      $("owner-error").textContent = error.message;
    }
    form.inert = false;
    password.value = "";
    password.focus();
  };
  return new Promise((resolve) => {
    const close = () => {
      form.removeEventListener("submit", send);
      password.value = "";
      resolve(answer); // which may still be under way
    };
    $("owner-title").textContent = question;
    $("owner-error").textContent = "";
    form.addEventListener("submit", send);
    dialog.addEventListener("close", close, { once: true });
    dialog.showModal();
  });
}

/** The button that closes the question unanswered. */
export function startOwnerDialog() {
  $("owner-cancel").addEventListener("click", () => $("owner-dialog").close());
}
