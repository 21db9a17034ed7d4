// A followed trajectory among the workers' lanes: its turns as bars, the environment's work as thin lines, its moves.

import { colour } from "./colours.js";

const PERIOD_MS = 2000;

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
      const reply = await fetch(`track?id=${encodeURIComponent(id)}`, { headers: { Accept: "application/json" } });
      if (id !== this.followed) return;
      if (reply.ok) this.track = await reply.json();
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
      context.beginPath();
      context.arc(x(at), places[target], 4, 0, 7);
      context.fillStyle = colour("ink");
      context.fill();
    }
  }
}

function bar(context, left, wide, top, high) {
  context.fillStyle = colour("card");
  context.fillRect(left - 1, top - 1, wide + 2, high + 2);
  context.fillStyle = colour("ink");
  context.fillRect(left, top, wide, high);
}

function line(context, x1, y1, x2, y2, isDashed) {
  for (const [style, wide] of [["card", 5], ["ink", 2]]) {
    context.strokeStyle = colour(style);
    context.lineWidth = wide;
    context.setLineDash(isDashed && style === "ink" ? [3, 3] : []);
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
    context.stroke();
  }
  context.setLineDash([]);
}
