// Asking again and again, while somebody looks at the page.

import { ApiError, Unreachable, keyEvents } from "./client.js";

/** Calls `ask` each `ms` while the page is visible and the API lets us in; returns a function that has it asked now. */
export function poll(ms, ask) {
  let timer = 0;
  let running = false;
  let again = false;
  let closed = false; // for want of a key
  let failures = 0;

  async function run() {
    clearTimeout(timer);
    if (running) {
      again = true;
      return;
    }
    if (document.hidden || closed) return;
    running = true;
    again = false;
    try {
      await ask();
      failures = 0;
    } catch (error) {
      closed = error instanceof ApiError && error.status === 401;
      failures += 1;
      if (!(error instanceof ApiError || error instanceof Unreachable)) reportError(error); // a fault of this page
    }
    running = false;
    timer = setTimeout(run, again ? 0 : ms * Math.min(1 + failures, 5));
  }

  document.addEventListener("visibilitychange", run);
  keyEvents.addEventListener("changed", () => {
    closed = false;
    run();
  });
  run();
  return run;
}
