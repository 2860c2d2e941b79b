// The list of jobs. A job opens where it stands, with its text as it comes.

import { call } from "./client.js";
import { byId, duration, make, makeButton, plural, say, setText } from "./dom.js";
import { follow } from "./follow.js";
import { poll } from "./poll.js";
import { isLive, stateName } from "./turn.js";

const PAGE = 12;
const EACH_MS = 2000;

/** Rows by job id: {element, head, …, opened: AbortController or null}. */
const rows = new Map();
let pages = 1;

/** Show the list and keep it fresh; returns a function that has it asked for now. */
export function startJobs() {
  const askNow = poll(EACH_MS, refresh);
  byId("more-button").addEventListener("click", () => {
    pages += 1;
    askNow();
  });
  return askNow;
}

async function refresh() {
  const jobs = [];
  let cursor = "";
  for (let page = 0; page < pages; page += 1) {
    const answer = await call(`jobs?${new URLSearchParams({ limit: PAGE, cursor })}`);
    jobs.push(...answer.data);
    cursor = answer.next_cursor ?? "";
    if (!cursor) break;
  }
  const list = byId("jobs");
  const now = jobs.map((job) => {
    const row = rows.get(job.id) ?? makeRow(job.id);
    drawRow(row, job);
    return row.element;
  });
  const ids = new Set(jobs.map((job) => job.id));
  for (const [id, row] of rows) if (!ids.has(id)) forget(id, row);
  now.forEach((element, index) => {
    // what stands right is left alone: moving an element would take its focus
    if (list.children[index] !== element) list.insertBefore(element, list.children[index] ?? null);
  });
  byId("no-jobs").hidden = now.length > 0;
  byId("more-button").hidden = !cursor;
}

function makeRow(id) {
  const row = { id, opened: null, job: null };
  row.dot = make("span", "dot");
  row.dot.setAttribute("aria-hidden", "true");
  row.title = make("span", "job-title");
  row.facts = make("span", "job-facts");
  row.head = makeButton("", "job-head", () => toggle(row));
  row.head.append(row.dot, row.title, row.facts);
  row.head.setAttribute("aria-expanded", "false");
  row.body = make("div", "job-body");
  row.body.id = `job-${id}`;
  row.body.hidden = true;
  row.head.setAttribute("aria-controls", row.body.id);
  row.element = make("li", "job", row.head, row.body);
  rows.set(id, row);
  return row;
}

function drawRow(row, job) {
  row.job = job;
  row.element.dataset.status = job.status;
  const title = job.metadata?.title;
  setText(row.title, typeof title === "string" && title ? title : `${job.id.slice(0, 13)}…`);
  const ago = duration(Math.max(0, Date.now() / 1000 - job.created_at));
  const place = job.queue_position ? [`position ${job.queue_position}`] : [];
  const tokens = job.usage.completion_tokens ? [plural(job.usage.completion_tokens, "token")] : [];
  setText(row.facts, [stateName(job.status), ...place, ...tokens, `${ago} ago`].join(", "));
  if (row.text && job.children) row.text.data = textOfGroup(job);
  if (row.act) setText(row.act, isLive(job.status) ? "Cancel" : "Delete");
}

function forget(id, row) {
  row.opened?.abort();
  rows.delete(id);
  row.element.remove();
}

function toggle(row) {
  const isOpen = row.opened !== null;
  row.head.setAttribute("aria-expanded", String(!isOpen));
  row.body.hidden = isOpen;
  if (isOpen) {
    row.opened.abort();
    row.opened = null;
    row.act = null;
    row.text = null;
    row.body.replaceChildren();
    return;
  }
  row.opened = new AbortController();
  const text = document.createTextNode("");
  row.text = text;
  const problem = make("p", "problem");
  problem.hidden = true;
  row.act = makeButton(isLive(row.job.status) ? "Cancel" : "Delete", "quiet", () => act(row, problem));
  const id = make("code", "job-id", row.id);
  const words = make("pre", "job-text", text);
  words.tabIndex = 0; // a long text is scrolled by the keyboard, too
  words.setAttribute("role", "group");
  words.setAttribute("aria-label", "Text");
  row.body.replaceChildren(words, problem, make("div", "job-foot", id, row.act));
  read(row, text, row.opened.signal).catch((error) => {
    if (row.opened?.signal.aborted !== false) return;
    problem.hidden = false;
    setText(problem, error.message);
  });
}

const textOfGroup = (job) => job.texts.map((one, index) => `${index + 1}. ${one.trimStart()}`).join("\n\n");

async function read(row, text, signal) {
  if (row.job.children) {
    text.data = textOfGroup(row.job); // and again with each look at the list
    return;
  }
  await follow(row.id, {
    signal,
    onLost: () => {},
    onComment: () => {},
    onTokens: (tokens) => text.appendData(tokens.map((one) => one.token).join("")),
  }).then((end) => {
    if (end) text.appendData(end.token);
    if (end?.error && end.status !== "cancelled") throw new Error(end.error.message);
  });
}

async function act(row, problem) {
  const path = `jobs/${encodeURIComponent(row.id)}`;
  problem.hidden = true;
  try {
    if (isLive(row.job.status)) {
      drawRow(row, await call(`${path}/cancel`, { method: "POST" }));
      say("Job cancelled");
    } else {
      await call(path, { method: "DELETE" });
      const next = row.element.nextElementSibling ?? row.element.previousElementSibling;
      forget(row.id, row);
      next?.querySelector("button").focus();
      say("Job deleted");
    }
  } catch (error) {
    problem.hidden = false;
    setText(problem, error.message);
  }
}
