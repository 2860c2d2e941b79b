// Calls of the API: where it is, the key, errors as it tells them.

/** Where this page is served, which is where the API is. */
export const base = new URL("..", import.meta.url);

const KEY = "carpool.key";
const read = (storage) => {
  try {
    return storage().getItem(KEY) ?? "";
  } catch {
    return ""; // storage is forbidden here
  }
};
let key = read(() => sessionStorage) || read(() => localStorage);

/** Tells "needed" when a call was refused for want of a good key, and "changed" when there is another one. */
export const keyEvents = new EventTarget();
export const hasKey = () => key !== "";
export const isKeyKept = () => read(() => localStorage) !== "";

/** Use this key from now on ("" for none): in this tab, or in this browser until it is forgotten. */
export function setKey(value, keep) {
  key = value.trim();
  for (const [storage, holds] of [[() => sessionStorage, !keep], [() => localStorage, keep]]) {
    try {
      if (holds && key) storage().setItem(KEY, key);
      else storage().removeItem(KEY);
    } catch {
      // it lasts as long as the page
    }
  }
  keyEvents.dispatchEvent(new Event("changed"));
}

/** The API said no. */
export class ApiError extends Error {
  constructor(status, code, message, retryAfterS) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }
}

/** Nobody answered, or what did is not the API: it may be back soon. */
export class Unreachable extends Error {}

/** An answer's response, of status 2xx. */
export async function open(path, { method = "GET", body, headers = {}, signal } = {}) {
  const all = { ...headers };
  if (key) all.Authorization = `Bearer ${key}`;
  if (body !== undefined || method === "POST") all["Content-Type"] = "application/json";
  const payload = body === undefined ? undefined : JSON.stringify(body);
  let response;
  try {
    response = await fetch(new URL(path, base), { method, headers: all, body: payload, signal, cache: "no-store" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Unreachable("the server does not answer");
  }
  if (response.ok) return response;
  throw await errorOf(response);
}

async function errorOf(response) {
  let error;
  try {
    ({ error } = await response.json());
  } catch {
    error = undefined;
  }
  if (!error) return new Unreachable(`the server answers ${response.status}`);
  if (response.status === 401) keyEvents.dispatchEvent(new CustomEvent("needed", { detail: error.message }));
  return new ApiError(response.status, error.code, error.message, Number(response.headers.get("Retry-After")) || 0);
}

/** The JSON of an answer; null where it has none. */
export async function call(path, options = {}) {
  const response = await open(path, options);
  if (response.status === 204) return null;
  try {
    return await response.json();
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Unreachable("the connection was cut");
  }
}
