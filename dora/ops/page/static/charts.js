// The line and bar charts, by uPlot.

import { colour } from "./colours.js";

const POINTS = 1500; // of one line

export class Charts {
  constructor(model) {
    this.model = model;
    this.range = [0, 1];
    this.charts = new Map();
    const share = (value) => (value === null || value === undefined ? "-" : `${Math.round(value * 100)}%`);
    this.time("tokens", [["tokens/s", "accent", 1, "fill"]], whole);
    this.time("requests", [["running", "accent", 2], ["waiting", "warn", 3], ["queued prompts", "muted", 4]], whole);
    this.time("kv", [["mean", "accent", 5], ["largest", "warn", 6], ["pools", "good", 7]], share, [0, 1]);
    this.steps("reward", [["mean reward", "accent"]], (value) => value?.toPrecision(4) ?? "-");
    this.steps("staleness", [["mean", "accent"], ["largest", "warn"]], (value) => value?.toFixed(2) ?? "-");
    new ResizeObserver((entries) => entries.forEach(({ target }) => this.resize(target.id))).observe(
      document.querySelector(".grid"),
    );
    const watch = new ResizeObserver((entries) => entries.forEach(({ target }) => this.resize(target.id)));
    for (const id of this.charts.keys()) watch.observe(document.getElementById(id));
  }

  time(id, lines, format, limits) {
    const data = () => {
      const samples = this.model.samples.slice(Math.max(0, this.model.firstSample(this.range[0]) - 1));
      const stride = Math.ceil(samples.length / POINTS) || 1;
      const shown = samples.filter((_, index) => index % stride === 0 || index === samples.length - 1);
      const column = (place) => shown.map((each) => (each[place] === -1 ? null : each[place]));
      return [column(0), ...lines.map((line) => column(line[2]))];
    };
    const series = lines.map(([label, name, , fill]) => ({
      label,
      stroke: () => colour(name),
      fill: fill ? () => colour("wash") : undefined,
      width: 1.5,
      points: { show: false },
      value: (_, value) => format(value),
    }));
    const x = { time: true, range: () => this.range };
    this.add(id, data, [{ label: "time", value: "{HH}:{mm}:{ss}" }, ...series], x, format, limits);
  }

  steps(id, lines, format) {
    const data = () => {
      const steps = this.model.steps.slice(-120);
      const columns = {
        reward: [steps.map((each) => each[4])],
        staleness: [steps.map((each) => each[5]), steps.map((each) => each[6])],
      };
      return [steps.map((each) => each[0]), ...columns[id]];
    };
    const series = lines.map(([label, name]) => ({
      label,
      stroke: () => colour(name),
      width: 1.5,
      points: { show: true, size: 4, fill: () => colour(name) },
      value: (_, value) => format(value),
    }));
    const x = { time: false, range: (_, first, last) => (first === null ? [0, 1] : [first - 0.6, last + 0.6]) };
    const limits = id === "staleness" ? [0, null] : undefined;
    this.add(id, data, [{ label: "step", value: (_, value) => value ?? "-" }, ...series], x, format, limits, true);
  }

  add(id, data, series, x, format, limits, isSteps = false) {
    const root = document.getElementById(id);
    const line = { stroke: () => colour("muted"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false } };
    const axis = { ...line, font: "11px system-ui, sans-serif", space: isSteps ? 40 : 80, size: 24, gap: 3 };
    const clockOf = (_, splits) => splits.map((at) => uPlot.fmtDate("{HH}:{mm}")(new Date(at * 1000)));
    const plot = new uPlot(
      {
        width: Math.max(120, root.clientWidth),
        height: 150,
        scales: { x, y: { range: (_, low, high) => span(low, high, limits) } },
        axes: [
          { ...axis, values: isSteps ? (_, splits) => splits.map((at) => (Number.isInteger(at) ? at : "")) : clockOf },
          { ...axis, space: 32, size: 52, values: (_, splits) => splits.map(format) },
        ],
        series,
        cursor: { points: { size: 6 }, drag: { x: false, y: false } },
        legend: { live: true },
        hooks: { setCursor: [(made) => made.cursor.left < 0 && made.setLegend({ idx: made.data[0].length - 1 }, false)] },
      },
      data(),
      root,
    );
    this.charts.set(id, { plot, data, root });
  }

  resize(id) {
    const chart = this.charts.get(id);
    if (chart && chart.root.clientWidth !== chart.plot.width && chart.root.clientWidth > 0) {
      chart.plot.setSize({ width: chart.root.clientWidth, height: 150 });
    }
  }

  draw(from, to) {
    this.range = [from, to];
    for (const { plot, data } of this.charts.values()) {
      plot.setData(data());
      if (plot.cursor.left < 0) plot.setLegend({ idx: plot.data[0].length - 1 }, false);
    }
  }

  redraw() {
    for (const { plot } of this.charts.values()) plot.redraw(true);
  }
}

function span(low, high, limits) {
  if (low === null) return [0, 1];
  const least = limits?.[0] ?? Math.min(low, 0 <= low && low < high / 2 ? 0 : low);
  const most = limits?.[1] ?? high;
  const room = (most - least || Math.abs(most) || 1) * 0.08;
  return [least === 0 ? 0 : least - room, limits?.[1] ?? most + room];
}

function whole(value) {
  if (value === null || value === undefined) return "-";
  const [number, unit] = Math.abs(value) >= 1e6 ? [value / 1e6, "M"] : Math.abs(value) >= 1e4 ? [value / 1e3, "k"] : [value, ""];
  return `${unit ? Number(number.toPrecision(3)) : Math.round(number * 10) / 10}${unit}`;
}
