// Server-sent events of a fetch. An EventSource could not send a key.

import { Unreachable } from "./client.js";

/** Lists of {id, data, comment}: with each, all events that have come together. Throws Unreachable where it is cut. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = {};
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(() => {
        throw new Unreachable("the connection was cut");
      });
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      const events = [];
      for (const line of lines) {
        if (line === "") {
          if (event.data !== undefined || event.comment !== undefined) events.push(event);
          event = {};
        } else if (line.startsWith("id: ")) event.id = line.slice(4);
        else if (line.startsWith("data: ")) event.data = JSON.parse(line.slice(6));
        else if (line.startsWith(": ")) event.comment = line.slice(2);
      }
      if (events.length) yield events;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
