// Small helpers to make and change elements. Text goes in as text, never as HTML.

export const byId = (id) => document.getElementById(id);

/** An element with a class and its children: nodes or strings. */
export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** A button that does something. */
export function makeButton(text, className, onClick) {
  const button = make("button", className, text);
  button.type = "button";
  button.addEventListener("click", onClick);
  return button;
}

/** Set a text only where it differs, so that nothing is announced or selected anew. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Tell those who listen to the page rather than look at it. */
export function say(text) {
  setText(byId("say"), text);
}

/** 1.2 s, 45 s, 3 min. */
export function duration(seconds) {
  if (seconds < 9.95) return `${seconds.toFixed(seconds < 0.995 ? 2 : 1)} s`;
  if (seconds < 99.5) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}

export const plural = (number, one) => `${number} ${one}${number === 1 ? "" : "s"}`;
