// The picture of the batch: a car for each worker with its seats, who rides in them, and the queue behind.

import { byId, make, plural, setText } from "./dom.js";
import { onScene } from "./scene.js";

const STATE = {
  loading: "loading its model",
  ready: "on the road",
  restarting: "starting its model again",
  draining: "letting its riders out",
  broken: "broken down",
  silent: "not heard from",
};
const LEAVE_MS = 700;

/** Cars that are drawn, by worker id; of each, the seat of each rider by its tag. */
const cars = new Map();
let own = () => new Set();

/** `ids()` are the jobs of this tab's conversation, which stand out. */
export function startBatch(ids) {
  own = ids;
  onScene(draw);
}

function draw(models) {
  const place = byId("batch");
  showPulse(models);
  if (!models) return;
  const shown = new Set();
  const blocks = models.map((model) => {
    const block = place.querySelector(`[data-model="${CSS.escape(model.model)}"]`) ?? makeModel(model.model);
    const road = block.querySelector(".cars");
    for (const worker of model.workers) {
      shown.add(worker.id);
      const car = cars.get(worker.id) ?? makeCar(worker);
      if (car.element.parentNode !== road) road.append(car.element);
      drawCar(car, worker);
    }
    drawQueue(block, model);
    return block;
  });
  for (const [id, car] of cars) if (!shown.has(id)) leave(id, car);
  const leaving = [...place.querySelectorAll("[data-model]")].filter((block) => block.querySelector(".leaving") && !blocks.includes(block));
  const now = [...blocks, ...leaving];
  if (now.length === 0) place.replaceChildren(make("p", "hint", "No worker is up. Start one: carpool worker"));
  else if (now.length !== place.children.length || now.some((block, index) => place.children[index] !== block)) place.replaceChildren(...now);
}

function makeModel(name) {
  const block = make("div", "model-block", make("h3", "model-name", name), make("ul", "cars"), make("div", "waiting"));
  block.dataset.model = name;
  return block;
}

function makeCar(worker) {
  const seats = make("ol", "seats");
  const name = make("p", "car-name");
  const element = make("li", "car-row arriving", name, make("div", "road", make("div", "car", seats)));
  const car = { element, name, seats, places: new Map() };
  cars.set(worker.id, car);
  requestAnimationFrame(() => requestAnimationFrame(() => element.classList.remove("arriving")));
  return car;
}

function leave(id, car) {
  cars.delete(id);
  car.element.classList.add("leaving");
  setTimeout(() => car.element.remove(), LEAVE_MS);
}

function drawCar(car, worker) {
  const { element, seats, places } = car;
  const taken = worker.riders.length;
  element.dataset.state = worker.state;
  element.dataset.size = worker.slots <= 12 ? "car" : worker.slots <= 40 ? "bus" : "train";
  element.classList.toggle("moving", taken > 0 && worker.state === "ready");
  const progress = worker.progress == null || worker.state === "ready" ? "" : ` ${Math.round(worker.progress * 100)} %`;
  const doing = worker.state === "loading" && worker.phase ? worker.phase : STATE[worker.state];
  const speed = taken && worker.tokens_per_s ? `, ${Math.round(worker.tokens_per_s)} tokens/s` : "";
  setText(car.name, `${worker.name} on ${worker.device}: ${doing}${progress}, ${taken} of ${worker.slots} seats taken${speed}`);
  while (seats.children.length < worker.slots) seats.append(makeSeat());
  while (seats.children.length > Math.max(worker.slots, 1)) seats.lastChild.remove();
  const tags = new Set(worker.riders.map((rider) => rider.tag));
  for (const tag of places.keys()) if (!tags.has(tag)) places.delete(tag);
  const inUse = new Set(places.values());
  const free = [...Array(worker.slots).keys()].filter((index) => !inUse.has(index));
  for (const { tag } of worker.riders) if (!places.has(tag) && free.length) places.set(tag, free.shift());
  const riders = new Map(worker.riders.map((rider) => [places.get(rider.tag), rider]));
  [...seats.children].forEach((seat, index) => drawSeat(seat, index + 1, riders.get(index)));
}

function makeSeat() {
  return make("li", "seat", make("span", "rider"), make("span", "unseen"));
}

function drawSeat(seat, number, rider) {
  const isOwn = rider?.id != null && own().has(rider.id);
  seat.className = rider ? `seat taken${isOwn ? " own" : ""}${rider.stalled ? " stalled" : ""}` : "seat";
  const done = rider?.max_tokens ? Math.min(100, (100 * rider.tokens) / rider.max_tokens) : 0;
  seat.style.setProperty("--done", String(Math.round(done)));
  setText(seat.firstChild, rider ? String(rider.tokens) : "");
  const of = rider?.max_tokens ? ` of at most ${rider.max_tokens}` : "";
  const whose = isOwn ? "yours" : "taken";
  setText(seat.lastChild, rider ? `Seat ${number}: ${whose}, ${plural(rider.tokens, "token")}${of}` : `Seat ${number}: free`);
  seat.firstChild.setAttribute("aria-hidden", "true");
  seat.title = seat.lastChild.textContent;
}

function drawQueue(block, model) {
  const place = block.querySelector(".waiting");
  const lost = model.stranded.length;
  const parts = [model.waiting ? `${plural(model.waiting, "job")} waiting` : "Nobody waits"];
  if (lost) parts.push(`${lost} without a worker, to be taken up again`);
  if (model.state !== "ready" && model.workers.length === 0) parts.push("no worker is up");
  let text = place.querySelector(".waiting-text");
  if (!text) {
    text = make("p", "waiting-text");
    place.append(text, make("ul", "queue"));
  }
  setText(text, parts.join(", "));
  const queue = place.querySelector(".queue");
  const persons = [...model.stranded.map(({ id }) => ({ id, lost: true })), ...model.queue.map((id) => ({ id, lost: false }))];
  while (queue.children.length > persons.length) queue.lastChild.remove();
  persons.forEach(({ id, lost: isLost }, index) => {
    const item = queue.children[index] ?? queue.appendChild(make("li", "", make("span", "unseen")));
    const isOwn = id != null && own().has(id);
    item.className = `person${isOwn ? " own" : ""}${isLost ? " lost" : ""}`;
    setText(item.firstChild, `${isOwn ? "Yours" : "A job"}${isLost ? ", its worker is gone" : `, place ${index + 1 - lost}`}`);
    item.title = item.firstChild.textContent;
  });
  queue.hidden = persons.length === 0;
}

function showPulse(models) {
  const pulse = byId("pulse");
  if (!models) {
    pulse.dataset.state = "away";
    setText(byId("pulse-text"), "no news from the server");
    return;
  }
  const workers = models.flatMap((model) => model.workers);
  const ready = workers.filter((worker) => worker.state === "ready");
  const slots = ready.reduce((sum, worker) => sum + worker.slots, 0);
  const taken = ready.reduce((sum, worker) => sum + worker.riders.length, 0);
  pulse.dataset.state = ready.length ? "ready" : "waiting";
  const loading = workers.some((worker) => worker.state === "loading" || worker.state === "restarting");
  setText(byId("pulse-text"), ready.length ? `${taken} of ${slots} seats taken` : loading ? "a worker starts" : "no worker is ready");
}
