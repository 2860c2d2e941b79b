// What the form asks for, as the body of a request: only what was set is in it.

import { byId, setText } from "./dom.js";

const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty",
  "presence_penalty", "frequency_penalty"];
const form = byId("parameter-form");
const STORED = "carpool.parameters";

export const mode = () => document.querySelector("input[name=mode]:checked").value;

/** The parameters that are set. A seed beyond what JavaScript counts exactly is left to the API to refuse. */
export function parameters() {
  const found = {};
  const model = byId("model").value;
  if (model) found.model = model;
  for (const name of NUMBERS) {
    const { value } = form.elements[name];
    if (value.trim() !== "") found[name] = Number(value);
  }
  const stops = form.elements.stop.value.split("\n").filter((line) => line !== "");
  if (stops.length) found.stop = stops.length === 1 ? stops[0] : stops;
  if (form.elements.priority.value) found.priority = form.elements.priority.value;
  return found;
}

/** The body of POST /jobs for a text that follows these turns. */
export function bodyOf(text, turns) {
  if (mode() === "prompt") return { prompt: text, ...parameters() };
  const messages = [];
  const system = form.elements.system.value.trim();
  if (system) messages.push({ role: "system", content: system });
  for (const turn of turns) if (turn.text !== "") messages.push({ role: turn.role, content: turn.text });
  messages.push({ role: "user", content: text });
  return { messages, ...parameters() };
}

/** Remember the form in this tab, and tell `onChange` when it changes. */
export function watchForm(onChange) {
  try {
    const stored = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
    for (const [name, value] of Object.entries(stored)) if (form.elements[name]) form.elements[name].value = value;
  } catch {
    // nothing is stored, or storage is forbidden
  }
  const changed = () => {
    const values = Object.fromEntries(new FormData(form));
    try {
      sessionStorage.setItem(STORED, JSON.stringify(values));
    } catch {
      // as above
    }
    const number = Object.values(values).filter((value) => value.trim() !== "").length;
    setText(byId("num-set"), number ? `${number} set` : "");
    onChange();
  };
  form.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  changed();
}
