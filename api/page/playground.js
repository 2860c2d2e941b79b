// The playground: sends, follows, stops, and takes up after a reload what this tab had begun.

import { ApiError, call, keyEvents } from "./client.js";
import { jobInAddress, load, newKey, putJobIntoAddress, save } from "./conversation.js";
import { byId, plural, say } from "./dom.js";
import { follow, insist, pause } from "./follow.js";
import { bodyOf, mode } from "./request.js";
import { onScene, troubleOf } from "./scene.js";
import { Rate, TurnView, isLive } from "./turn.js";

const TITLE_CHARACTERS = 80;
const ASK_EACH_MS = 1000;

export class Playground {
  #conversation = load();
  #views = [];
  #run = null; // of the answer that is under way: {turn, view, rate, stop, lost, note}
  #onChange;

  constructor(onChange) {
    this.#onChange = onChange;
    onScene(() => this.#show());
    keyEvents.addEventListener("changed", () => this.#resume());
  }

  /** Take up what there was: the job in the address, else what this tab keeps. */
  async start() {
    const named = jobInAddress();
    const { turns } = this.#conversation;
    if (named && turns.at(-1)?.id !== named) await this.#openJob(named);
    document.querySelector(`input[name=mode][value=${this.#conversation.mode}]`).checked = true;
    this.#draw();
    this.#resume();
  }

  /** Ids of the jobs of this conversation. */
  get ids() {
    return new Set(this.#conversation.turns.map((turn) => turn.id).filter(Boolean));
  }

  /** The model that the last job went to; "" before there was one. */
  get model() {
    return this.#conversation.model ?? "";
  }

  get isBusy() {
    return this.#run !== null;
  }

  /** The request as it stands: with what is in the box, else the one that was sent last. */
  get request() {
    const text = byId("prompt").value;
    const { turns, last } = this.#conversation;
    if (text.trim() === "" && last && (last.prompt === undefined) === (mode() === "chat")) return last;
    return bodyOf(text, mode() === "chat" ? turns : []);
  }

  /** Begin anew. What runs is left to itself: it is in the list of jobs. */
  clear() {
    this.#leave();
    this.#conversation = { mode: mode(), turns: [], pending: null };
    putJobIntoAddress("");
    this.#keep();
    this.#draw();
    this.#showError("");
  }

  async send(text) {
    if (this.#run || text.trim() === "") return;
    this.#showError("");
    if (mode() === "prompt" || this.#conversation.mode !== mode()) this.#conversation.turns = [];
    const body = bodyOf(text, this.#conversation.turns);
    this.#conversation.mode = mode();
    this.#conversation.last = body;
    this.#conversation.turns.push({ role: "user", text }, { role: "assistant", text: "", status: "sending", sentAt: Date.now() });
    const title = text.trim().replace(/\s+/g, " ").slice(0, TITLE_CHARACTERS);
    this.#conversation.pending = { key: newKey(), text, body: { ...body, metadata: { title } } };
    this.#keep();
    this.#draw();
    say("Sent");
    await this.#resume();
  }

  /** Have the job stopped. Before it is known to be accepted, it is stopped as soon as it is. */
  stop() {
    const run = this.#run;
    if (!run || run.stops) return;
    run.stops = true;
    say("Stopping");
    this.#show();
    this.#cancel(run);
  }

  async #cancel(run) {
    if (!run.turn.id) return;
    try {
      await insist(() => call(`jobs/${encodeURIComponent(run.turn.id)}/cancel`, { method: "POST" }), {
        signal: run.leaving.signal,
        onLost: () => {},
      });
    } catch (error) {
      if (!run.leaving.signal.aborted) this.#showError(error.message);
    }
  }

  /** Bring the last turn to its end, if it is not there. */
  async #resume() {
    const turn = this.#conversation.turns.at(-1);
    if (this.#run || turn?.role !== "assistant" || !isLive(turn.status)) return;
    const view = this.#views.at(-1);
    const run = { turn, view, rate: new Rate(), leaving: new AbortController(), stops: false, lost: false, comment: "" };
    this.#run = run;
    this.#show();
    try {
      if (!turn.id) await this.#submit(run);
      if (run.stops) this.#cancel(run);
      this.#askMeanwhile(run);
      await this.#follow(run);
    } catch (error) {
      if (run.leaving.signal.aborted) return;
      this.#failed(run, error);
    } finally {
      if (this.#run === run) this.#run = null;
      run.leaving.abort();
      this.#keep();
      this.#show();
    }
  }

  async #submit(run) {
    const { pending } = this.#conversation;
    if (!pending) throw new ApiError(0, "unknown", "this request was not sent: send it again", 0);
    const { signal } = run.leaving;
    const onLost = (lost) => this.#lost(run, lost);
    const headers = { "Idempotency-Key": pending.key };
    // with its key it makes one job, however often it is sent
    const job = await insist(() => call("jobs", { method: "POST", body: pending.body, headers, signal }), { signal, onLost });
    this.#conversation.pending = null;
    this.#take(run, job);
    run.turn.id = job.id;
    run.turn.seed = job.seed;
    this.#conversation.model = job.model;
    putJobIntoAddress(job.id);
    this.#keep();
    if (job.status === "queued") say(job.queue_position ? `Waiting at position ${job.queue_position}` : "Waiting");
  }

  async #follow(run) {
    const { turn, view } = run;
    view.reset();
    turn.tokens = 0;
    let isFirst = true; // what comes at once may be old
    const end = await follow(turn.id, {
      signal: run.leaving.signal,
      onLost: (lost) => this.#lost(run, lost),
      onComment: (text) => {
        run.comment = text;
        this.#show();
      },
      onTokens: (tokens) => {
        if (turn.tokens === 0 && turn.ttft == null && turn.sentAt) turn.ttft = (Date.now() - turn.sentAt) / 1000;
        if (turn.tokens === 0) say("The answer comes");
        view.append(tokens.map((one) => one.token).join(""));
        turn.tokens = tokens.at(-1).n;
        turn.status = "running";
        run.comment = "";
        if (!isFirst || tokens.length === 1) run.rate.add(turn.tokens);
        isFirst = false;
        turn.rate = run.rate.perSecond() ?? turn.rate;
        this.#show();
        this.#scroll();
      },
    });
    if (end) {
      view.append(end.token);
      turn.tokens = end.n;
    }
    const job = await insist(() => call(`jobs/${encodeURIComponent(turn.id)}`, { signal: run.leaving.signal }), {
      signal: run.leaving.signal,
      onLost: (lost) => this.#lost(run, lost),
    });
    this.#take(run, job);
    turn.reason = job.finish_reason;
    turn.seed = job.seed;
    turn.error = job.error && job.status !== "cancelled" ? job.error.message : undefined;
    const seconds = job.finished_at - job.started_at;
    if (job.started_at && seconds > 0 && turn.tokens > 1) turn.rate = turn.tokens / seconds;
    say(turn.error ? `Failed: ${turn.error}` : `${turn.status === "cancelled" ? "Stopped" : "Done"}: ${plural(turn.tokens, "token")}`);
    this.#scroll();
  }

  /** While the first token has not come: how is it? */
  async #askMeanwhile(run) {
    const { signal } = run.leaving;
    while (!signal.aborted && !run.turn.tokens) {
      try {
        if (!document.hidden) this.#take(run, await call(`jobs/${encodeURIComponent(run.turn.id)}`, { signal }));
      } catch {
        // the stream tells what is wrong
      }
      this.#show();
      await pause(ASK_EACH_MS, signal);
    }
  }

  #take(run, job) {
    const { turn } = run;
    turn.position = job.queue_position;
    turn.eta = job.eta_s;
    turn.attempts = job.attempts;
    // an end is told by the stream, after its last token
    turn.status = isLive(job.status) || this.#isAtEnd(run, job) ? job.status : turn.status === "sending" ? "running" : turn.status;
  }

  #isAtEnd({ turn }, job) {
    return turn.tokens === job.usage?.completion_tokens;
  }

  #failed(run, error) {
    const { turns, pending } = this.#conversation;
    this.#showError(error.message);
    if (error.status === 401) return; // it is taken up with the next key
    if (pending) {
      // nothing was accepted: as if it had not been sent
      turns.splice(-2, 2);
      this.#conversation.pending = null;
      if (byId("prompt").value === "") byId("prompt").value = pending.text;
      this.#draw();
    } else {
      run.turn.status = "failed";
      run.turn.error = error.message;
    }
  }

  async #openJob(id) {
    let title = "";
    try {
      const job = await call(`jobs/${encodeURIComponent(id)}`);
      title = job.metadata?.title ?? "";
      if (job.children) {
        this.#showError(`This job has ${job.children.length} parts. Open it in the list of jobs.`);
        return;
      }
    } catch {
      // the stream tells what is wrong
    }
    const said = typeof title === "string" && title ? [{ role: "user", text: title }] : [];
    this.#conversation = { mode: "prompt", turns: [...said, { role: "assistant", text: "", status: "running", id }], pending: null };
  }

  #leave() {
    this.#run?.leaving.abort(new Error("left"));
    this.#run = null;
  }

  #lost(run, lost) {
    if (run.lost === lost) return;
    run.lost = lost;
    if (lost) say("The server does not answer, trying again");
    this.#show();
  }

  #note(run) {
    if (run.lost) return "the server does not answer, trying again";
    if (run.stops) return "stopping";
    if (!run.turn.id) return "";
    const trouble = troubleOf(run.turn.id);
    if (trouble) return trouble;
    return run.comment.startsWith("stalled") ? "worker lost, waiting for its recovery" : "";
  }

  #show() {
    const run = this.#run;
    if (run) {
      const note = this.#note(run);
      if (note !== run.note && note.startsWith("worker lost")) say("The worker is lost. The answer goes on when it is recovered");
      run.note = note;
      run.view.show(note);
    } else this.#views.at(-1)?.show();
    byId("stop-button").hidden = !run;
    byId("send-button").disabled = Boolean(run);
    byId("stage").setAttribute("aria-busy", String(Boolean(run)));
    this.#onChange();
  }

  #draw() {
    this.#views = this.#conversation.turns.map((turn) => new TurnView(turn));
    byId("turns").replaceChildren(...this.#views.map((view) => view.element));
    byId("welcome").hidden = this.#views.length > 0;
    byId("stage").scrollTop = byId("stage").scrollHeight;
    this.#onChange();
  }

  /** Stay at the end, if that is where the reader is. */
  #scroll() {
    const stage = byId("stage");
    if (stage.scrollHeight - stage.scrollTop - stage.clientHeight < 120) stage.scrollTop = stage.scrollHeight;
  }

  #keep() {
    save(this.#conversation);
  }

  #showError(text) {
    byId("error").textContent = text;
    byId("error").hidden = text === "";
  }
}
