// Workers as lanes: colours of versions over time, moves as arcs, KV in use now. Only visible rows are drawn.

import { colour, versionColour } from "./colours.js";
import { begin, clock, timeAxis } from "./drawing.js";

const BOTTOM = 22;
const RIGHT = 62;
const NAMED = 10; // pixels of a row that has a name
const ARCS = 1500; // drawn, the latest
const ARCS_OF_THIN_ROWS = 200; // and those of the selected worker

export class Lanes {
  constructor(root, model, chosen) {
    this.root = root;
    this.model = model;
    this.chosen = chosen; // called with the selected place
    this.canvas = root.querySelector("canvas");
    this.spacer = root.querySelector(".spacer");
    this.tip = root.parentElement.appendChild(Object.assign(document.createElement("div"), { className: "tip", hidden: true }));
    this.height = 0; // of a row; 0: as fits
    this.selected = "";
    this.withArcs = true;
    this.tracks = null; // what is followed
    this.sought = "";
    this.order = [];
    this.rows = new Map(); // by the worker's name
    this.range = [0, 1];
    root.addEventListener("scroll", () => this.draw(...this.range), { passive: true });
    root.addEventListener("keydown", (event) => this.pressed(event));
    root.addEventListener("click", (event) => this.select(this.rowAt(event)));
    root.addEventListener("pointermove", (event) => this.hover(event));
    root.addEventListener("pointerleave", () => (this.tip.hidden = true));
  }

  // The rows follow the roster and what is sought.
  arrange() {
    const words = this.sought.toLowerCase();
    const collator = new Intl.Collator("en", { numeric: true });
    const lanes = this.model.lanes;
    this.order = lanes
      .map((_, place) => place)
      .filter((place) => `${lanes[place].name} ${lanes[place].host}`.toLowerCase().includes(words))
      .sort((one, other) => collator.compare(lanes[one].name, lanes[other].name));
    this.rows = new Map(this.order.map((place, row) => [lanes[place].name, row]));
    this.wide = 0;
  }

  // The width of the longest name.
  longest(context) {
    this.wide ||= Math.max(20, ...this.order.map((place) => context.measureText(this.model.lanes[place].name).width));
    return this.wide;
  }

  get rowHeight() {
    const room = Math.min(innerHeight * 0.6, 560) - BOTTOM;
    return this.height || Math.max(2, Math.min(24, Math.floor(room / Math.max(1, this.order.length))));
  }

  draw(from, to) {
    this.range = [from, to];
    const row = this.rowHeight;
    const whole = this.order.length * row + BOTTOM;
    const shown = Math.max(70, Math.min(whole, Math.min(innerHeight * 0.6, 560)));
    if (this.shown !== shown) this.root.style.height = `${(this.shown = shown)}px`;
    if (this.whole !== whole) this.spacer.style.height = `${Math.max(0, (this.whole = whole) - shown)}px`;
    const width = this.root.clientWidth;
    const context = begin(this.canvas, width, shown);
    this.left = row >= NAMED ? Math.min(150, width * 0.25, 14 + this.longest(context)) : 6;
    this.right = width - RIGHT;
    this.bottom = shown - BOTTOM;
    this.x = (at) => this.left + ((at - from) / (to - from)) * (this.right - this.left);
    const first = Math.floor(this.root.scrollTop / row);
    const last = Math.min(this.order.length, Math.ceil((this.root.scrollTop + this.bottom) / row));
    context.save();
    context.beginPath();
    context.rect(0, 0, width, this.bottom);
    context.clip();
    this.strips(context, first, last, row);
    if (this.withArcs) this.arcs(context, row, from);
    this.followed(context, row);
    context.restore();
    timeAxis(context, from, to, this.left, this.right, this.bottom);
    context.textAlign = "left";
    context.fillText("KV", this.right + 6, this.bottom + 5);
  }

  // Rectangles of one colour are drawn together: to set a colour takes longer than to fill a rectangle.
  strips(context, first, last, row) {
    const gap = row > 6 ? 2 : row > 3 ? 1 : 0;
    const scrolled = this.root.scrollTop;
    const kinds = this.model.states.length;
    const found = new Map();
    for (let index = first; index < last; index++) {
      const { segments } = this.model.lanes[this.order[index]];
      const top = index * row - scrolled;
      let end = this.right;
      for (let place = segments.length - 1; place >= 0 && end > this.left; place--) {
        const segment = segments[place];
        const begins = Math.max(this.left, this.x(segment[0]));
        if (end > begins) {
          const kind = segment[1] * kinds + segment[2];
          let list = found.get(kind);
          if (!list) found.set(kind, (list = []));
          list.push(begins, top, Math.max(1, end - begins));
          end = begins;
        }
      }
    }
    for (const [kind, list] of found) {
      const version = Math.floor(kind / kinds);
      const style = this.style(version, this.model.states[kind - version * kinds]);
      if (!style) continue;
      context.fillStyle = style;
      for (let at = 0; at < list.length; at += 3) context.fillRect(list[at], list[at + 1], list[at + 2], row - gap);
    }
    for (let index = first; index < last; index++) {
      const place = this.order[index];
      this.beside(context, this.model.lanes[place], place, index * row - scrolled, row, gap);
    }
  }

  style(version, state) {
    if (state === "gone" || state === "drained") return "";
    if (state === "lost") return colour("fault");
    return versionColour(version, state === "ready" ? 0.9 : 0.4);
  }

  // Its name, its KV in use, and whether it is selected.
  beside(context, lane, place, top, row, gap) {
    const { kv } = this.model.worker(place);
    context.fillStyle = colour("line");
    context.fillRect(this.right + 6, top, RIGHT - 12, row - gap);
    context.fillStyle = kv > 90 ? colour("warn") : colour("accent");
    context.fillRect(this.right + 6, top, ((RIGHT - 12) * Math.min(kv, 100)) / 100, row - gap);
    if (row >= NAMED) {
      context.fillStyle = colour(lane.name === this.selected ? "ink" : "muted");
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(short(context, lane.name, this.left - 10), this.left - 6, top + (row - gap) / 2);
    }
    if (lane.name === this.selected) {
      context.strokeStyle = colour("ink");
      context.lineWidth = 2;
      context.strokeRect(this.left - 1, top - 1, this.right - this.left + 2, Math.max(row - gap, 3) + 1);
    }
  }

  arcs(context, row, from) {
    const moves = this.model.moves;
    context.beginPath();
    context.rect(this.left, 0, this.right - this.left, this.bottom);
    context.clip();
    const isOf = (move) => this.selected !== "" && (move[2] === this.selected || move[3] === this.selected);
    const most = row >= NAMED ? ARCS : ARCS_OF_THIN_ROWS;
    const first = moves.length - most;
    const shown = moves.filter((move, place) => move[0] >= from && (place >= first || isOf(move)));
    const faint = Math.max(0.16, Math.min(0.8, 90 / shown.length)); // many moves would hide the lanes
    const strong = Math.max(faint, Math.min(1, 60 / shown.filter(isOf).length));
    for (const move of shown) {
      const arc = this.arc(move, row);
      if (!arc) continue;
      const isDone = move[6] === "done";
      context.globalAlpha = isOf(move) ? strong : faint;
      context.lineWidth = isOf(move) && strong > 0.7 ? 2 : 1.25;
      context.strokeStyle = context.fillStyle = isDone ? colour("ink") : colour("bad");
      context.setLineDash(isDone ? [] : [3, 3]);
      context.beginPath();
      context.moveTo(arc.x, arc.source);
      context.quadraticCurveTo(arc.x - arc.bulge, (arc.source + arc.target) / 2, arc.x, arc.target);
      context.stroke();
      context.beginPath();
      context.arc(arc.x, arc.target, 2.2, 0, 7);
      context.fill();
    }
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  followed(context, row) {
    context.beginPath();
    context.rect(this.left, 0, this.right - this.left, this.bottom);
    context.clip();
    const middle = (name) => (this.rows.has(name) ? (this.rows.get(name) + 0.5) * row - this.root.scrollTop - 1 : null);
    this.tracks?.draw(context, this.x, middle, row);
  }

  // Where a move lies; null if neither of its ends is visible.
  arc([at, , from, to], row) {
    const [source, target] = [this.rows.get(from), this.rows.get(to)];
    if (source === undefined || target === undefined) return null;
    const middle = (place) => (place + 0.5) * row - this.root.scrollTop;
    const [y1, y2] = [middle(source), middle(target)];
    if (Math.max(y1, y2) < 0 || Math.min(y1, y2) > this.bottom) return null;
    return { x: this.x(at), source: y1, target: y2, bulge: 8 + Math.min(40, Math.abs(y2 - y1) * 0.4) };
  }

  rowAt(event) {
    const y = event.clientY - this.canvas.getBoundingClientRect().top;
    return y > this.bottom ? -1 : Math.floor((y + this.root.scrollTop) / this.rowHeight);
  }

  select(row) {
    if (row < 0 || row >= this.order.length) return;
    const place = this.order[row];
    this.selected = this.model.lanes[place].name;
    const [top, high] = [row * this.rowHeight, this.rowHeight];
    if (top < this.root.scrollTop) this.root.scrollTop = top;
    if (top + high > this.root.scrollTop + this.bottom) this.root.scrollTop = top + high - this.bottom;
    this.draw(...this.range);
    this.chosen(place);
  }

  pressed(event) {
    const now = this.rows.get(this.selected) ?? -1;
    const page = Math.max(1, Math.floor(this.bottom / this.rowHeight));
    const last = this.order.length - 1;
    const to = { ArrowDown: now + 1, ArrowUp: now - 1, PageDown: now + page, PageUp: now - page, Home: 0, End: last };
    if (!(event.key in to)) return;
    event.preventDefault();
    this.select(Math.max(0, Math.min(last, to[event.key])));
  }

  hover(event) {
    const row = this.rowAt(event);
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    this.tip.hidden = row < 0 || row >= this.order.length || x < this.left || x > this.right;
    if (this.tip.hidden) return;
    const [from, to] = this.range;
    const at = from + ((x - this.left) / (this.right - this.left)) * (to - from);
    const lane = this.model.lanes[this.order[row]];
    const segment = lane.segments.findLast((each) => each[0] <= at);
    const state = segment ? `${segment[1] < 0 ? "" : `v${segment[1]}, `}${this.model.states[segment[2]]}` : "unknown";
    const move = this.moveAt(x, y);
    this.tip.textContent = `${lane.name} at ${clock(at)}: ${state}${move ? `\n${told(move)}` : ""}`;
    const parent = this.tip.parentElement.getBoundingClientRect();
    this.tip.style.left = `${Math.min(event.clientX - parent.left + 12, parent.width - 220)}px`;
    this.tip.style.top = `${event.clientY - parent.top + 16}px`;
  }

  moveAt(x, y) {
    return this.model.moves.findLast((move) => {
      const arc = this.arc(move, this.rowHeight);
      if (!arc || y < Math.min(arc.source, arc.target) - 3 || y > Math.max(arc.source, arc.target) + 3) return false;
      return x < arc.x + 4 && x > arc.x - arc.bulge / 2 - 4;
    });
  }
}

export function told([at, trajectory, from, to, kind, reason, result]) {
  return `${clock(at)} ${trajectory}: ${kind} from ${from} to ${to} (${reason}), ${result}`;
}

function short(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let kept = text.length;
  while (kept > 2 && context.measureText(`…${text.slice(-kept)}`).width > room) kept--;
  return `…${text.slice(-kept)}`;
}
