// Asks for an API key where the API asks for one.

import { hasKey, isKeyKept, keyEvents, setKey } from "./client.js";
import { byId, setText } from "./dom.js";

const dialog = byId("key-dialog");
const WHY = "This service asks for a key. Whoever runs it makes one with carpool keys create.";

function ask(why) {
  setText(byId("key-why"), why);
  byId("key-keep").checked = isKeyKept();
  byId("key-forget").hidden = !hasKey();
  if (!dialog.open) dialog.showModal();
  byId("key-input").focus();
}

export function startKey() {
  // several calls are refused at once: one dialog, and none again before there is another key or a click
  let asked = false;
  keyEvents.addEventListener("needed", ({ detail }) => {
    if (!asked) ask(hasKey() ? `The key is not good: ${detail}` : WHY);
    asked = true;
  });
  keyEvents.addEventListener("changed", () => {
    asked = false;
  });
  byId("key-button").addEventListener("click", () => ask(hasKey() ? "A key is in use. Give another one, or forget it." : WHY));
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-forget").addEventListener("click", () => {
    dialog.close();
    setKey("", false);
  });
  dialog.addEventListener("close", () => {
    byId("key-input").value = "";
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const value = byId("key-input").value;
    if (value.trim() === "") return;
    const { checked } = byId("key-keep");
    dialog.close();
    setKey(value, checked);
  });
}
