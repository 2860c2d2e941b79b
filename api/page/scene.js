// What the API sees of its batches (GET /service), for all parts of the page.

import { call } from "./client.js";
import { poll } from "./poll.js";

const listeners = new Set();
/** The models as last seen; null while the API does not tell. */
export let models = null;

/** Have `listener(models or null)` called with each look. */
export function onScene(listener) {
  listeners.add(listener);
  listener(models);
}

/** Look once a second, while the page is visible. */
export function startLooking() {
  return poll(1000, async () => {
    try {
      ({ models } = await call("service"));
    } catch (error) {
      models = null;
      throw error;
    } finally {
      for (const listener of listeners) listener(models);
    }
  });
}

/** Why a job does not go on just now, in plain words; "" where nothing is known to be wrong. */
export function troubleOf(id) {
  for (const model of models ?? []) {
    for (const worker of model.workers) {
      const rider = worker.riders.find((one) => one.id === id);
      if (!rider) continue;
      if (rider.stalled || worker.state === "silent") return "worker lost, waiting for its recovery";
      if (worker.state === "restarting" || worker.state === "broken") return "the model is started again, then it goes on";
      return "";
    }
    if (model.stranded.some((one) => one.id === id)) return "worker lost, waiting for its recovery";
    if (model.queue.includes(id) || model.waiting > model.queue.length) {
      if (model.state === "no worker") return "no worker is up, the job waits for one";
      if (model.state === "loading") return "a worker loads its model";
    }
  }
  return "";
}
