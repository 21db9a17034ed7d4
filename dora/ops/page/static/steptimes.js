// The times of steps, stacked by what they went to, with a list of the chosen step's parts.

import { colour, partColour } from "./colours.js";
import { begin, levels, nice, write } from "./drawing.js";

const HEIGHT = 230;
const HEIGHT_BESIDE = 300; // with the list of parts beside it
const LEFT = 46;
const TOP = 8;
const BOTTOM = 22;
const BAR = 9; // pixels of a step, at least
const BAR_MOST = 46;

export class StepTimes {
  constructor(root, model) {
    this.root = root;
    this.model = model;
    this.canvas = root.querySelector("canvas");
    this.title = root.querySelector("#step-title");
    this.list = root.querySelector("#parts");
    this.chosen = -1; // the step under the pointer or chosen by keys; -1: the latest
    this.canvas.addEventListener("pointermove", (event) => this.choose(this.stepAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.choose(-1));
    this.canvas.addEventListener("blur", () => this.choose(-1));
    this.canvas.addEventListener("keydown", (event) => this.pressed(event));
  }

  draw() {
    const width = this.canvas.parentElement.clientWidth;
    const high = this.list.closest("div").offsetTop > this.canvas.parentElement.offsetTop ? HEIGHT : HEIGHT_BESIDE;
    const context = begin(this.canvas, width, high);
    const most = Math.max(4, Math.floor((width - LEFT) / BAR));
    this.shown = this.model.steps.slice(-most).filter((step) => totalOf(step) > 0);
    const top = nice(Math.max(0, ...this.shown.map(totalOf)), 0.01);
    const bottom = high - BOTTOM;
    const y = (seconds) => bottom - (seconds / top) * (bottom - TOP);
    this.each = Math.min(BAR_MOST, (width - LEFT) / Math.max(1, this.shown.length));
    levels(context, top, y, LEFT, width, seconds);
    this.shown.forEach((step, place) => this.bar(context, step, LEFT + place * this.each, y));
    this.labels(context, bottom, width);
    this.tell();
  }

  bar(context, step, left, y) {
    const wide = Math.max(1, this.each - (this.each > 6 ? 2 : 1));
    let low = 0;
    const stack = step[8].length ? step[8].map((seconds, part) => [seconds, partColour(part)]) : [[totalOf(step), colour("none")]];
    for (const [seconds, style] of stack) {
      if (seconds <= 0) continue;
      context.fillStyle = style;
      context.fillRect(left, y(low + seconds), wide, y(low) - y(low + seconds));
      low += seconds;
    }
    if (step[3] >= 0) {
      const waited = Math.round(y(Math.min(step[3], low)));
      context.fillStyle = colour("card");
      context.fillRect(left - 1, waited - 2, wide + 2, 4);
      context.fillStyle = colour("ink");
      context.fillRect(left - 1, waited - 1, wide + 2, 2);
    }
    if (step[0] === this.chosen) {
      context.strokeStyle = colour("ink");
      context.lineWidth = 1.5;
      context.strokeRect(left - 1, y(low) - 1, wide + 2, y(0) - y(low) + 2);
    }
  }

  labels(context, bottom, width) {
    context.fillStyle = colour("muted");
    context.textAlign = "center";
    context.textBaseline = "top";
    let free = -Infinity;
    this.shown.forEach((step, place) => {
      const at = LEFT + (place + 0.5) * this.each;
      const half = context.measureText(step[0]).width / 2;
      if (at - half < free || at + half > width) return;
      context.fillText(step[0], at, bottom + 5);
      free = at + half + 18;
    });
  }

  tell() {
    const step = this.shown.find((each) => each[0] === this.chosen) ?? this.shown.at(-1);
    const rows = step ? this.rowsOf(step) : [];
    write(this.title, step ? `Step ${step[0]}: ${seconds(totalOf(step))}` : "No step is committed yet.");
    while (this.list.rows.length > rows.length) this.list.deleteRow(-1);
    while (this.list.rows.length < rows.length) {
      const row = this.list.insertRow();
      row.insertCell().appendChild(document.createElement("span")).className = "swatch";
      row.insertCell();
      row.insertCell().className = "n";
      row.insertCell().className = "n";
    }
    rows.forEach(([style, words, time, share], place) => {
      const cells = this.list.rows[place].cells;
      cells[0].firstChild.style.background = style;
      [words, time, share].forEach((text, cell) => write(cells[cell + 1], text));
    });
  }

  // The parts that any shown step has, as they are stacked; then what the trainer says of its waiting.
  rowsOf(step) {
    const total = totalOf(step);
    const row = (style, words, time) => [style, words, seconds(time), total ? `${Math.round((100 * time) / total)}%` : ""];
    const rows = this.model.parts
      .map(([, words], part) => [part, words])
      .filter(([part]) => this.shown.some((each) => each[8][part] > 0))
      .map(([part, words]) => row(partColour(part), words, step[8][part] ?? 0))
      .reverse();
    if (!step[8].length) rows.unshift(row(colour("none"), "not divided", total));
    if (step[3] >= 0) rows.push(row(colour("ink"), "line: the trainer itself says it waited", step[3]));
    return rows;
  }

  choose(step) {
    if (step === this.chosen) return;
    this.chosen = step;
    this.draw();
  }

  stepAt(event) {
    const place = Math.floor((event.clientX - this.canvas.getBoundingClientRect().left - LEFT) / this.each);
    return this.shown[place]?.[0] ?? -1;
  }

  pressed(event) {
    const last = this.shown.length - 1;
    const now = this.chosen < 0 ? last : this.shown.findIndex((step) => step[0] === this.chosen);
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last };
    if (!(event.key in to) || last < 0) return;
    event.preventDefault();
    this.choose(this.shown[Math.max(0, Math.min(last, to[event.key]))][0]);
  }
}

// The time that a step took; of the first one, that of its parts.
function totalOf(step) {
  const parts = step[8].reduce((sum, each) => sum + each, 0);
  return step[2] >= 0 ? Math.max(step[2], parts) : parts;
}

export function seconds(value) {
  if (value === null || value === undefined) return "-";
  if (value >= 120) return `${Math.round(value / 6) / 10} min`;
  if (value === 0) return "0 s";
  return value < 0.995 ? `${Math.round(value * 1000)} ms` : `${Number(value.toPrecision(3))} s`;
}
