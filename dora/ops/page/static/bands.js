// The window: open groups of each version over time, stacked, with the commits of steps.

import { colour, versionColour } from "./colours.js";
import { begin, count, levels, nice, timeAxis } from "./drawing.js";

const HEIGHT = 210;
const LEFT = 44;
const RIGHT = 8;
const TOP = 16;
const BOTTOM = 22;

export function drawBands(canvas, model, from, to) {
  const [width, height] = [canvas.parentElement.clientWidth, HEIGHT];
  const context = begin(canvas, width, height);
  const [right, bottom] = [width - RIGHT, height - BOTTOM];
  const samples = model.samples.slice(Math.max(0, model.firstSample(from) - 1));
  const stride = Math.max(1, Math.ceil(samples.length / Math.max(200, right - LEFT)));
  const shown = samples.filter((_, index) => index % stride === 0 || index === samples.length - 1);
  const top = nice(Math.max(1, ...shown.map((each) => each[8].reduce((sum, row) => sum + row[1] + row[2], 0))));
  const x = (at) => LEFT + ((at - from) / (to - from)) * (right - LEFT);
  const y = (groups) => bottom - (groups / top) * (bottom - TOP);
  levels(context, top, y, LEFT, right, (value) => (value === Math.round(value) ? count(value) : ""));
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, right - LEFT, bottom);
  context.clip();
  for (const [version, runs] of runsOf(shown)) {
    for (const run of runs) {
      fill(context, run, x, y, "low", "high", versionColour(version, 0.42));
      fill(context, run, x, y, "low", "middle", versionColour(version, 0.95));
      label(context, run, x, y, version);
    }
  }
  commits(context, model, from, x, bottom);
  context.restore();
  timeAxis(context, from, to, LEFT, right, bottom);
}

// For each version the stretches of samples that have it: where its band lies in the stack.
function runsOf(samples) {
  const found = new Map();
  let open = new Map();
  for (const sample of samples) {
    const next = new Map();
    let low = 0;
    for (const [version, finished, unfinished] of sample[8]) {
      const high = low + finished + unfinished;
      let run = open.get(version);
      if (!run) {
        run = [];
        if (!found.has(version)) found.set(version, []);
        found.get(version).push(run);
      }
      run.push({ at: sample[0], low, middle: low + finished, high });
      next.set(version, run);
      low = high;
    }
    open = next;
  }
  return found;
}

function fill(context, run, x, y, low, high, style) {
  context.fillStyle = style;
  context.beginPath();
  context.moveTo(x(run[0].at), y(run[0][low]));
  for (const each of run) context.lineTo(x(each.at), y(each[high]));
  for (let index = run.length - 1; index >= 0; index--) context.lineTo(x(run[index].at), y(run[index][low]));
  context.closePath();
  context.fill();
}

function label(context, run, x, y, version) {
  const widest = run.reduce((most, each) => (each.high - each.low > most.high - most.low ? each : most));
  if (x(run.at(-1).at) - x(run[0].at) < 34 || y(widest.low) - y(widest.high) < 14) return;
  const at = Math.min(Math.max(x(widest.at), x(run[0].at) + 16), x(run.at(-1).at) - 16);
  context.fillStyle = colour("ink");
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(`v${version}`, at, (y(widest.low) + y(widest.high)) / 2);
}

function commits(context, model, from, x, bottom) {
  context.strokeStyle = colour("ink");
  context.fillStyle = colour("muted");
  const shown = model.steps.filter((step) => step[1] >= from).length;
  context.globalAlpha = Math.max(0.12, Math.min(0.55, 24 / shown));
  context.textAlign = "left";
  context.textBaseline = "top";
  context.lineWidth = 1;
  let free = -Infinity;
  for (const [step, at] of model.steps) {
    if (at < from) continue;
    const place = Math.round(x(at)) + 0.5;
    context.beginPath();
    context.moveTo(place, 0);
    context.lineTo(place, bottom);
    context.stroke();
    if (place > free) {
      context.fillText(`step ${step}`, place + 3, 1);
      free = place + 52;
    }
  }
  context.globalAlpha = 1;
}
