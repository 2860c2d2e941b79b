// One turn on the screen: what was said, and how the answer does.

import { duration, make, plural, setText } from "./dom.js";

const STATES = {
  sending: "sending",
  queued: "waiting",
  running: "riding",
  succeeded: "done",
  failed: "failed",
  cancelled: "stopped",
  expired: "too late",
};
export const isLive = (status) => status === "sending" || status === "queued" || status === "running";
export const stateName = (status) => STATES[status] ?? status;

/** Tokens a second over the last moments, of tokens that came live. */
export class Rate {
  #samples = [];

  add(n) {
    const now = performance.now();
    this.#samples.push([now, n]);
    while (this.#samples.length > 2 && now - this.#samples[0][0] > 5000) this.#samples.shift();
  }

  /** null before it can be told. */
  perSecond() {
    if (this.#samples.length < 2) return null;
    const [[from, first], [to, last]] = [this.#samples[0], this.#samples.at(-1)];
    return to - from < 50 ? null : ((last - first) * 1000) / (to - from);
  }
}

/** The view of a turn: {role, text} of a user, and of an assistant {status, tokens, ttft, rate, …} besides. */
export class TurnView {
  constructor(turn) {
    this.turn = turn;
    this.text = document.createTextNode(turn.text.trimStart());
    this.words = make("div", "words", this.text);
    this.facts = make("ul", "facts");
    this.problem = make("p", "problem");
    this.problem.hidden = true;
    const name = turn.role === "user" ? "You" : "Carpool";
    this.element = make("li", `turn ${turn.role}`, make("p", "who", name), this.words);
    if (turn.role === "assistant") this.element.append(this.problem, this.facts);
    this.show();
  }

  append(text) {
    this.turn.text += text;
    // the space before a first word is the text's own; on the screen nothing stands before it
    this.text.appendData(this.text.length ? text : text.trimStart());
  }

  reset() {
    this.turn.text = "";
    this.text.data = "";
  }

  /** Show the turn's state; `note` says why nothing comes just now. */
  show(note = "") {
    const { turn } = this;
    if (turn.role !== "assistant") return;
    this.element.dataset.status = turn.status;
    this.element.classList.toggle("held", note !== "");
    const facts = [[stateName(turn.status), "state"]];
    if (note) facts.push([note, "note"]);
    if (turn.status === "queued" && turn.position) facts.push([`position ${turn.position}`, "position"]);
    if (turn.status === "queued" && turn.eta != null) facts.push([`done in about ${duration(turn.eta)}`, "eta"]);
    if (turn.tokens) facts.push([plural(turn.tokens, "token"), "tokens"]);
    if (turn.ttft != null) facts.push([`first after ${duration(turn.ttft)}`, "ttft"]);
    if (turn.rate != null) facts.push([`${turn.rate.toFixed(turn.rate < 10 ? 1 : 0)} tokens/s`, "rate"]);
    if (turn.reason && turn.status === "succeeded") facts.push([turn.reason === "length" ? "stopped at most tokens" : "came to its end", "reason"]);
    if (turn.seed != null && !isLive(turn.status)) facts.push([`seed ${turn.seed}`, "seed"]);
    if (turn.attempts > 1) facts.push([plural(turn.attempts, "worker") + " in turn", "attempts"]);
    while (this.facts.children.length > facts.length) this.facts.lastChild.remove();
    facts.forEach(([text, kind], index) => {
      const item = this.facts.children[index] ?? this.facts.appendChild(make("li"));
      setText(item, text);
      item.dataset.fact = kind;
    });
    this.problem.hidden = !turn.error;
    setText(this.problem, turn.error ?? "");
  }
}
