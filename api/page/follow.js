// A job's stream that outlives its connections: it is taken up again behind the last token that came.

import { ApiError, Unreachable, open } from "./client.js";
import { eventsOf } from "./sse.js";

const FIRST_WAIT_MS = 250;
const LONGEST_WAIT_MS = 4000;

/** Wait, or until the browser is online again, or the signal. */
export function pause(ms, signal) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      removeEventListener("online", done);
      signal?.removeEventListener("abort", done);
      resolve();
    };
    const timer = setTimeout(done, ms);
    addEventListener("online", done);
    signal?.addEventListener("abort", done);
  });
}

/** Do something until it is answered, whatever happens to the connection. `onLost(true)` while it is away. */
export async function insist(action, { signal, onLost }) {
  for (let wait = FIRST_WAIT_MS; ; wait = Math.min(2 * wait, LONGEST_WAIT_MS)) {
    try {
      const answer = await action();
      onLost(false);
      return answer;
    } catch (error) {
      signal?.throwIfAborted();
      const away = error instanceof Unreachable || (error instanceof ApiError && error.code === "redis_unavailable");
      if (!away) throw error;
      onLost(true);
      await pause(wait * (0.75 + Math.random() / 2), signal);
      signal?.throwIfAborted();
    }
  }
}

/**
 * Follow a job from its first token to its end; returns the end's data, or null where the end was told before.
 *
 * `onTokens(data[])` gets the tokens that came together, `onComment(text)` what is said while none comes, `onLost(bool)`
 * whether the connection is away. Throws ApiError, and what the signal's reason is.
 */
export async function follow(id, { signal, onTokens, onComment, onLost }) {
  let last = "";
  let wait = FIRST_WAIT_MS;
  for (;;) {
    const headers = last ? { "Last-Event-ID": last } : {};
    const path = `jobs/${encodeURIComponent(id)}/stream`;
    try {
      const response = await open(path, { headers, signal });
      if (response.status === 204) return null;
      onLost(false);
      for await (const events of eventsOf(response)) {
        wait = FIRST_WAIT_MS;
        const tokens = [];
        let end;
        for (const { id: cursor, data, comment } of events) {
          if (comment !== undefined) onComment(comment);
          if (data === undefined) continue;
          // a fault of the stream has no id; the job may well go on. Without a good key, asking anew says so
          if (cursor === undefined && data.error.code === "invalid_api_key") break;
          if (cursor === undefined) throw new ApiError(0, data.error.code, data.error.message, 0);
          last = cursor;
          if (data.status === undefined) tokens.push(data);
          else end = data;
        }
        if (tokens.length) onTokens(tokens);
        if (end) return end;
      }
    } catch (error) {
      signal.throwIfAborted();
      // of what the API says, only what passes by itself is waited for
      if (!(error instanceof Unreachable || (error instanceof ApiError && error.status === 503))) throw error;
    }
    signal.throwIfAborted();
    onLost(true);
    await pause(wait * (0.75 + Math.random() / 2), signal);
    wait = Math.min(2 * wait, LONGEST_WAIT_MS);
    signal.throwIfAborted();
  }
}
