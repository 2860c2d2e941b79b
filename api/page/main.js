// Puts the parts of the page together.

import { startBatch } from "./batch.js";
import { call } from "./client.js";
import { startCode } from "./code.js";
import { byId, make } from "./dom.js";
import { startJobs } from "./jobs.js";
import { startKey } from "./key.js";
import { Playground } from "./playground.js";
import { poll } from "./poll.js";
import { mode, watchForm } from "./request.js";
import { startLooking } from "./scene.js";

const MODELS_EACH_MS = 10_000;
let showCode = () => {};
let askForJobs = () => {};
let lookNow = () => {};

const playground = new Playground(() => showCode());
const prompt = byId("prompt");

async function send() {
  const text = prompt.value;
  if (playground.isBusy || text.trim() === "") return;
  prompt.value = "";
  const sent = playground.send(text);
  lookNow();
  await sent;
  askForJobs();
}

function showMode() {
  const isChat = mode() === "chat";
  byId("system-label").hidden = !isChat;
  prompt.placeholder = isChat ? "Write something…" : "The beginning of a text…";
  showCode();
}

startKey();
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !byId("key-dialog").open && !event.isComposing) playground.stop();
});
prompt.addEventListener("input", () => showCode());
byId("stop-button").addEventListener("click", () => {
  playground.stop();
  prompt.focus();
});
byId("new-button").addEventListener("click", () => {
  playground.clear();
  prompt.focus();
});
for (const example of document.querySelectorAll(".example")) {
  example.addEventListener("click", () => {
    prompt.value = example.textContent;
    prompt.focus();
    send();
  });
}
// the address keeps the job's id, so this link must not change it
byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  prompt.focus();
});
for (const input of document.querySelectorAll("input[name=mode]")) input.addEventListener("change", showMode);
byId("model").addEventListener("change", () => showCode());

poll(MODELS_EACH_MS, async () => {
  const { data } = await call("v1/models");
  const select = byId("model");
  const names = ["", ...data.map((model) => model.id)];
  if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  const { value } = select;
  const options = names.map((name) => {
    const option = make("option", "", name || "Default model");
    option.value = name;
    return option;
  });
  select.replaceChildren(...options);
  select.value = names.includes(value) ? value : "";
  showCode();
});

watchForm(() => showCode());
showCode = startCode(
  () => playground.request,
  () => playground.model || (byId("model").options[1]?.value ?? ""),
);
startBatch(() => playground.ids);
lookNow = startLooking();
askForJobs = startJobs();
await playground.start();
showMode();
