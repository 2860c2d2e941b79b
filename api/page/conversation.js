// What this tab keeps of its conversation: it is there again after a reload.

const STORED = "carpool.conversation";

/** {mode, turns, pending}: pending is a request that may not have been answered yet, with its Idempotency-Key. */
export function load() {
  try {
    const found = JSON.parse(sessionStorage.getItem(STORED));
    if (Array.isArray(found?.turns)) return found;
  } catch {
    // nothing is stored, or storage is forbidden
  }
  return { mode: "chat", turns: [], pending: null };
}

export function save(conversation) {
  try {
    sessionStorage.setItem(STORED, JSON.stringify(conversation));
  } catch {
    // it is full or forbidden: the conversation lasts as long as the page
  }
}

/** The job that the address names, "" where it names none. */
export function jobInAddress() {
  return new URLSearchParams(location.hash.slice(1)).get("job") ?? "";
}

export function putJobIntoAddress(id) {
  history.replaceState(null, "", id ? `#${new URLSearchParams({ job: id })}` : location.pathname + location.search);
}

/** An Idempotency-Key. */
export function newKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return `page-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
