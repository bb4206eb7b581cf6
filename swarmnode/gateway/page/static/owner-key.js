// The owner's key: its password, if it has one, is asked for each time, sent with one request, and not stored.

import { askJson } from "./api.js";
import { $ } from "./dom.js";

/** Ask for consent, and for the password of a locked key; send the owner's command, and return the response; null if the user cancels. */
export function askAsOwner(question, path, body, locked) {
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
      resolve(answer); // it may still be pending
    };
    $("owner-title").textContent = question;
    $("owner-lock").hidden = !locked;
    password.required = locked;
    $("owner-error").textContent = "";
    form.addEventListener("submit", send);
    dialog.addEventListener("close", close, { once: true });
    dialog.showModal();
  });
}

/** Set up the button that cancels the dialog. */
export function startOwnerDialog() {
  $("owner-cancel").addEventListener("click", () => $("owner-dialog").close());
}
