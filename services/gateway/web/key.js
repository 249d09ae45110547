// Ask for the API key in a dialog. It stays in this tab (sessionStorage) and is forgotten when the tab is closed.

import { giveKey, ServerError } from "./api.js";

// Call `run` until it is not refused for its key. Throw the refusal if the dialog is closed without one.
export async function withKey(run) {
  for (;;) {
    try {
      return await run();
    } catch (error) {
      if (!(error instanceof ServerError) || error.status !== 401) throw error;
      if (!(await dialog(error.message))) throw new ServerError("This server needs an API key.", 401);
    }
  }
}

function dialog(why) {
  const box = document.getElementById("key-dialog");
  const input = document.getElementById("key");
  document.getElementById("key-why").textContent = why;
  input.value = "";
  return new Promise((done) => {
    let given = false;
    document.getElementById("key-form").onsubmit = (submit) => {
      submit.preventDefault();
      giveKey(input.value.trim());
      given = true;
      box.close();
    };
    document.getElementById("key-cancel").onclick = () => box.close();
    box.onclose = () => done(given);
    if (!box.open) box.showModal();
  });
}
