// What the page's modules share: canvases in device pixels, their axes, numbers, and texts that change.

import { colour } from "./colours.js";

export const FONT = "11px system-ui, sans-serif";

// Returns the context of a canvas, cleared, in CSS pixels.
export function begin(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== wide || canvas.height !== high) {
    canvas.width = wide;
    canvas.height = high;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = FONT;
  return context;
}

const STEPS_S = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200];

// Draws ticks of the local time below `bottom`.
export function timeAxis(context, from, to, left, right, bottom) {
  const wanted = Math.max(2, Math.floor((right - left) / 90));
  const step = STEPS_S.find((each) => (to - from) / each <= wanted) ?? 14400;
  const offset = new Date(to * 1000).getTimezoneOffset() * 60;
  context.fillStyle = colour("muted");
  context.strokeStyle = colour("line");
  context.textAlign = "center";
  context.textBaseline = "top";
  context.lineWidth = 1;
  for (let at = Math.ceil((from - offset) / step) * step + offset; at <= to; at += step) {
    const x = left + ((at - from) / (to - from)) * (right - left);
    if (x < left + 20 || x > right - 20) continue;
    context.beginPath();
    context.moveTo(x + 0.5, bottom);
    context.lineTo(x + 0.5, bottom + 4);
    context.stroke();
    context.fillText(clock(at, step < 60), x, bottom + 5);
  }
}

// Draws the levels 0, half of `top` and `top`, each with what `text` says of it.
export function levels(context, top, y, left, right, text) {
  context.strokeStyle = colour("line");
  context.fillStyle = colour("muted");
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.lineWidth = 1;
  for (const share of [0, 0.5, 1]) {
    const place = Math.round(y(top * share)) + 0.5;
    context.beginPath();
    context.moveTo(left, place);
    context.lineTo(right, place);
    context.stroke();
    context.fillText(text(top * share), left - 5, place);
  }
}

export function clock(at, withSeconds = true) {
  const time = new Date(at * 1000);
  const parts = [time.getHours(), time.getMinutes(), ...(withSeconds ? [time.getSeconds()] : [])];
  return parts.map((part) => String(part).padStart(2, "0")).join(":");
}

// A round number of at least `value` and `least`.
export function nice(value, least = 1) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, least)));
  return [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= value && each >= least) ?? 10 * power;
}

export function count(value) {
  return Math.round(value).toLocaleString("en");
}

// Sets the text of an element where it is another one.
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
