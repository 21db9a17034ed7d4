// Trajectories over time: one that is followed among the workers' lanes, and those that the selected worker has.
// Turns are bars, the environment's work thin lines, waiting dashed lines, moves dots.

import { colour, versionColour } from "./colours.js";
import { begin } from "./drawing.js";

const PERIOD_MS = 2000;
const ROW = 18;

export class Tracks {
  constructor(field, note, due) {
    this.field = field;
    this.note = note;
    this.due = due; // called when there is something to draw
    this.track = null;
    this.followed = "";
    this.timer = 0;
    field?.addEventListener("change", () => this.follow(field.value.trim()));
    const asked = new URLSearchParams(location.search).get("follow");
    if (field && asked) {
      field.value = asked;
      this.follow(asked);
    }
  }

  follow(id) {
    clearTimeout(this.timer);
    this.track = null;
    this.followed = id;
    this.note.textContent = "";
    if (id) this.load(id);
    this.due();
  }

  async load(id) {
    let goesOn = true;
    try {
      const reply = await fetch(`tracks?id=${encodeURIComponent(id)}`, { headers: { Accept: "application/json" } });
      if (id !== this.followed) return;
      if (reply.ok) [this.track] = await reply.json();
      else goesOn = reply.status >= 500;
      if (reply.ok) this.tell();
      else this.note.textContent = this.track ? "is committed or gone; this was its way" : (await reply.text()).trim();
    } catch {
      // the front is away
    }
    if (id !== this.followed) return;
    if (goesOn) this.timer = setTimeout(() => this.load(id), PERIOD_MS);
    this.due();
  }

  tell() {
    const [, lanes, stretches, hops] = this.track;
    const turns = new Set(stretches.map((each) => each[4])).size;
    const several = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
    this.note.textContent = `${several(turns, "turn")}, ${several(lanes.length, "worker")}, ${several(hops.length, "move")}`;
  }

  // `middle`: where the lane of a worker lies; null: it is not among the rows.
  draw(context, x, middle, row) {
    if (!this.track) return;
    const [, lanes, stretches, hops] = this.track;
    const places = lanes.map(middle);
    const high = Math.max(3, Math.min(row - 6, 14));
    for (const [kind, lane, from, to] of stretches) {
      const y = places[lane];
      if (y === null) continue;
      if (kind === "sampled") bar(context, x(from), Math.max(2, x(to) - x(from)), y - high / 2, high);
      else line(context, x(from), y, x(to), y, kind === "queue");
    }
    for (const [source, target, left, at] of hops) {
      if (places[source] === null || places[target] === null) continue;
      line(context, x(left), places[source], x(at), places[target], false);
      dot(context, x(at), places[target], 4);
    }
  }
}

// The sessions of the selected worker, one a row: pale where another worker sampled.
export class Sessions {
  constructor() {
    this.worker = "";
    this.tracks = [];
    this.timer = 0;
    this.canvas = document.createElement("canvas");
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", "Turns of the worker's trajectories over time");
  }

  // `version`: of the worker, for its colour. `lanes`: whose axis of time this one continues.
  show(worker, version, lanes) {
    this.version = version;
    this.lanes = lanes;
    if (worker !== this.worker) {
      clearTimeout(this.timer);
      this.worker = worker;
      this.tracks = [];
      this.load(worker);
    }
    this.draw();
  }

  async load(worker) {
    try {
      const reply = await fetch(`tracks?worker=${encodeURIComponent(worker)}`, { headers: { Accept: "application/json" } });
      if (worker !== this.worker) return;
      this.tracks = reply.ok ? await reply.json() : [];
    } catch {
      // the front is away
    }
    if (worker !== this.worker) return;
    this.timer = setTimeout(() => this.load(worker), PERIOD_MS);
    this.draw();
  }

  draw() {
    const { left, right, x } = this.lanes;
    const width = this.lanes.root.clientWidth;
    this.canvas.hidden = this.tracks.length === 0;
    const context = begin(this.canvas, width, Math.max(1, this.tracks.length * ROW));
    const margin = Math.max(left, 70);
    this.tracks.forEach(([id, lanes, stretches, hops], place) => {
      const y = (place + 0.5) * ROW;
      context.fillStyle = colour("muted");
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(id, margin - 6, y);
      context.save();
      context.beginPath();
      context.rect(margin, place * ROW, right - margin, ROW);
      context.clip();
      for (const [kind, lane, from, to] of stretches) {
        if (kind === "sampled") {
          context.fillStyle = versionColour(this.version, lanes[lane] === this.worker ? 0.95 : 0.35);
          context.fillRect(x(from), y - 6, Math.max(1.5, x(to) - x(from)), 12);
        } else stroke(context, kind === "queue" ? "warn" : "muted", 1.5, x(from), y, x(to), y, kind === "queue" ? [3, 3] : []);
      }
      for (const hop of hops) dot(context, x(hop[3]), y, 3.5);
      context.restore();
    });
  }
}

function bar(context, left, wide, top, high) {
  context.fillStyle = colour("card");
  context.fillRect(left - 1, top - 1, wide + 2, high + 2);
  context.fillStyle = colour("ink");
  context.fillRect(left, top, wide, high);
}

function line(context, x1, y1, x2, y2, isDashed) {
  stroke(context, "card", 5, x1, y1, x2, y2, []);
  stroke(context, "ink", 2, x1, y1, x2, y2, isDashed ? [3, 3] : []);
}

function stroke(context, style, wide, x1, y1, x2, y2, dash) {
  context.strokeStyle = colour(style);
  context.lineWidth = wide;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
  context.setLineDash([]);
}

function dot(context, x, y, radius) {
  context.fillStyle = colour("ink");
  context.beginPath();
  context.arc(x, y, radius, 0, 7);
  context.fill();
}
