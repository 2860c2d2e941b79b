// The panel with the code for what is on the screen.

import { keyEvents } from "./client.js";
import { byId, say, setText } from "./dom.js";
import { note, snippet } from "./snippets.js";

/** `body()` is the request as it stands, `model()` the model that it goes to where it names none. */
export function startCode(body, model) {
  const language = () => document.querySelector("input[name=language]:checked").value;
  const show = () => {
    if (!byId("code").open) return;
    setText(byId("snippet"), snippet(language(), body(), model()));
    setText(byId("snippet-note"), note(language()));
  };
  byId("code").addEventListener("toggle", show);
  for (const input of document.querySelectorAll("input[name=language]")) input.addEventListener("change", show);
  keyEvents.addEventListener("changed", show);
  byId("copy-button").addEventListener("click", async () => {
    const copied = await copy(byId("snippet"));
    setText(byId("copy-button"), copied ? "Copied" : "Press Ctrl C");
    say(copied ? "Copied" : "Selected: press Control C to copy");
    setTimeout(() => setText(byId("copy-button"), "Copy"), 2000);
  });
  return show;
}

async function copy(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return true;
  } catch {
    // without HTTPS, or without permission: what is selected can be copied by hand
    getSelection().selectAllChildren(element);
    return false;
  }
}
