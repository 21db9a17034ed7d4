// The overview: loads the history, follows the updates, draws.

import { act } from "./acting.js";
import { drawBands } from "./bands.js";
import { Charts } from "./charts.js";
import { read } from "./colours.js";
import { count, write } from "./drawing.js";
import { Lanes, told } from "./lanes.js";
import { Model } from "./model.js";
import { StepTimes } from "./steptimes.js";
import { Sessions, Tracks } from "./tracks.js";

const LOAD_S = 2; // least time between two loads of the history
const RETRY_S = 5;
const SPAN_LEAST_S = 60;
const byId = (id) => document.getElementById(id);

const model = new Model();
read();
const charts = new Charts(model);
const stepTimes = new StepTimes(byId("steps"), model);
const lanes = new Lanes(byId("lanes"), model, showWorker);
const sessions = new Sessions();
let events = null;
let span = 900;
let isPaused = false;
let isDue = false; // a frame
let loadedAt = -Infinity;
let appliedMs = 0;

async function load() {
  events?.close();
  await new Promise((resolve) => setTimeout(resolve, Math.max(0, loadedAt + LOAD_S * 1000 - performance.now())));
  loadedAt = performance.now();
  try {
    const reply = await fetch("history", { headers: { Accept: "application/json" } });
    if (reply.status === 401) return location.reload();
    if (!reply.ok) throw new Error((await reply.text()).trim());
    const isFirst = model.seq === 0;
    model.load(await reply.json());
    if (isFirst) chooseSpan();
  } catch (error) {
    show(error.message, "bad");
    return setTimeout(load, RETRY_S * 1000);
  }
  lanes.arrange();
  due();
  follow();
}

// The shortest span that shows all that is known.
function chooseSpan() {
  const known = model.samples.length ? model.now - model.samples[0][0] : 0;
  const spans = [...document.querySelectorAll('input[name="span"]')];
  const chosen = spans.find((each) => Number(each.value) >= known && Number(each.value) <= 900) ?? spans[1];
  chosen.checked = true;
  span = Number(chosen.value);
}

function follow() {
  events = new EventSource(`events?after=${model.seq}`);
  events.addEventListener("reload", load);
  events.onmessage = (message) => {
    const began = performance.now();
    const goesOn = model.apply(JSON.parse(message.data));
    appliedMs += performance.now() - began;
    if (goesOn) due();
    else load();
  };
  events.onerror = () => {
    show("no connection to the front", "bad");
    if (events.readyState === EventSource.CLOSED) refused();
  };
}

// Asks why there are no events: a limit, or a cookie that is not valid.
async function refused() {
  const control = new AbortController();
  try {
    const reply = await fetch(`events?after=${model.seq}`, { signal: control.signal, headers: { Accept: "text/plain" } });
    if (!reply.ok) show((await reply.text()).trim(), "bad");
    control.abort();
    if (reply.status === 401) return location.reload();
  } catch {
    // the front is away
  }
  setTimeout(load, RETRY_S * 1000);
}

function due() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    if (!isPaused && model.states.length) draw(); // not before the history is there
  });
}

function draw() {
  const began = performance.now();
  const [from, to] = [Math.max(model.now - span, Math.min(begun(), model.now - SPAN_LEAST_S)), model.now];
  show(model.trouble || "live", model.trouble ? "bad" : "good");
  showHead();
  showVersions();
  drawBands(byId("bands"), model, from, to);
  lanes.draw(from, to);
  charts.draw(from, to);
  stepTimes.draw();
  if (lanes.selected && model.places.has(lanes.selected)) showWorker(model.places.get(lanes.selected));
  performance.clearMeasures("dora-update");
  performance.measure("dora-update", { start: began - appliedMs, end: performance.now() });
  document.documentElement.dataset.seq = model.seq;
  document.documentElement.dataset.updateMs = (performance.now() - began + appliedMs).toFixed(2);
  appliedMs = 0;
}

// When what is known begins: the charts of a young service are not empty to the left.
function begun() {
  return model.samples.length ? model.samples[0][0] : model.now;
}

function show(text, tone) {
  const live = byId("live");
  if (live.textContent !== text) live.textContent = text;
  live.className = `pill ${tone}`;
}

function showHead() {
  showLines(byId("head"), model.head.filter((line) => line[2] !== "count"));
  showLines(byId("counts"), model.head.filter((line) => line[2] === "count"));
}

function showLines(head, lines) {
  while (head.children.length > lines.length) head.lastChild.remove();
  while (head.children.length < lines.length) {
    const line = head.appendChild(document.createElement("div"));
    line.append(document.createElement("dt"), document.createElement("dd"));
  }
  lines.forEach(([name, text, tone], place) => {
    const line = head.children[place];
    write(line.children[0], name);
    write(line.children[1], text);
    if (line.className !== tone) line.className = tone;
  });
}

function showVersions() {
  const body = byId("versions");
  while (body.rows.length > model.versions.length) body.deleteRow(-1);
  while (body.rows.length < model.versions.length) {
    const row = body.insertRow();
    for (let cell = 0; cell < 9; cell++) row.insertCell().className = cell > 1 ? "n" : "";
  }
  model.versions.forEach((version, place) => {
    version.forEach((value, cell) => {
      const text = cell === 0 ? `v${value}` : cell === 1 ? value : count(value);
      write(body.rows[place].cells[cell], text);
    });
  });
}

function showWorker(place) {
  const root = byId("worker");
  const worker = model.worker(place);
  if (root.dataset.worker !== worker.name) {
    root.replaceChildren();
    root.dataset.worker = worker.name;
    const name = root.appendChild(document.createElement("strong"));
    name.textContent = worker.name;
    root.appendChild(document.createElement("span")).className = "facts";
    const isOperator = byId("rebalance") !== null;
    if (isOperator) {
      const link = root.appendChild(document.createElement("a"));
      link.href = `trajectories?worker=${encodeURIComponent(worker.name)}`;
      link.textContent = "its trajectories";
      if (!worker.isPool) offerDrain(root, worker);
    }
    if (isOperator) root.appendChild(sessions.canvas);
    root.appendChild(document.createElement("ul"));
  }
  if (sessions.canvas.parentElement) sessions.show(worker.name, worker.version, lanes);
  write(root.querySelector(".facts"), factsOf(worker));
  showMoves(root.querySelector("ul"), worker.name);
}

function factsOf(worker) {
  const place = worker.host ? `, on ${worker.host}` : "";
  if (worker.isPool) return `${worker.state}, ${count(worker.waiting)} parked, memory ${worker.kv}%${place}`;
  const version = worker.version < 0 ? "" : `, v${worker.version}`;
  const requests = `${count(worker.running)} running, ${count(worker.waiting)} waiting`;
  return `${worker.state}${version}, ${requests}, KV ${worker.kv}%, ${count(worker.tokens)} tokens/s${place}`;
}

function offerDrain(root, worker) {
  const drain = root.appendChild(document.createElement("button"));
  drain.className = "quiet";
  drain.textContent = "Drain";
  drain.onclick = () =>
    act("drain", { worker: worker.name }, `Drain ${worker.name}?`, "Its requests move elsewhere, then the worker ends.");
}

function showMoves(list, name) {
  const moves = model.moves.filter((move) => move[2] === name || move[3] === name).slice(-4).reverse();
  while (list.children.length > moves.length) list.lastChild.remove();
  while (list.children.length < moves.length) list.appendChild(document.createElement("li"));
  moves.forEach((move, place) => write(list.children[place], told(move)));
}

byId("spans").addEventListener("change", (event) => {
  span = Number(event.target.value);
  draw();
});
byId("pause").addEventListener("click", (event) => {
  isPaused = !isPaused;
  event.target.setAttribute("aria-pressed", String(isPaused));
  event.target.textContent = isPaused ? "Go on" : "Pause";
  if (isPaused) show("paused", "warn");
  else draw();
});
byId("find").addEventListener("input", (event) => {
  lanes.sought = event.target.value;
  lanes.arrange();
  draw();
});
byId("rows").addEventListener("input", (event) => {
  lanes.height = Number(event.target.value);
  draw();
});
byId("arcs").addEventListener("change", (event) => {
  lanes.withArcs = event.target.checked;
  draw();
});
byId("scale")?.addEventListener("submit", (event) => {
  event.preventDefault();
  const workers = Number(byId("count").value);
  act("scale", { workers }, `Scale to ${count(workers)} workers?`, "Workers start, or are drained and end, on all hosts together.");
});
byId("rebalance")?.addEventListener("click", () =>
  act("rebalance", {}, "Re-balance now?", "The service plans which workers host which version, and begins the moves and loads."),
);
addEventListener("resize", due);
lanes.tracks = new Tracks(byId("follow"), byId("followed"), due);
document.addEventListener("theme", () => {
  read();
  charts.redraw();
  due();
});
load();
