// Draw the lines over time (uPlot) and the picture of the last iterations (canvas). Colours come from page.css.

import { clock, count, milliseconds, NONE } from "./format.js";

const SILENT_MS = 15000; // between two rows: a line ends there; the rows of an hour are 6 s apart
const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600]; // between two times of an axis
const SHORT_S = 60; // from this step on a time has no seconds
const isShort = (from, to) => to - from < 5 * SHORT_S;
const WHOLE = [1, 2, 5].flatMap((digit) => [0, 1, 2, 3, 4, 5].map((zeros) => digit * 10 ** zeros)).sort((a, b) => a - b);

// Labels of an axis: of all values in the unit of the largest.
const ticks = (units) => (plot, values) => {
  const [, one, unit] = units.find(([least]) => (values.at(-1) ?? 0) >= least);
  return values.map((value) => `${Number((value / one).toFixed(3))}${unit}`);
};
const ofMs = ticks([[60000, 60000, " min"], [1000, 1000, " s"], [0, 1, " ms"]]);
const ofCount = ticks([[1e9, 1e9, " G"], [1e6, 1e6, " M"], [1e4, 1e3, " k"], [0, 1, ""]]);
const ofShare = ticks([[0, 1, " %"]]);
const ofTime = (plot, values, axis, space, step) =>
  values.map((value) => clock(1000 * value).slice(0, step < SHORT_S ? 8 : 5));

const share = (value) => `${Math.round(value)} %`;

// The lines of each chart: [label, value of a row, colour, dashed].
const CHARTS = {
  throughput: { unit: count, ticks: ofCount, lines: [["tokens/s", (row) => row("tok_s"), "--line1"]], fill: true },
  sequences: {
    unit: count, ticks: ofCount, whole: true,
    lines: [
      ["running", (row) => row("running"), "--line1"],
      ["waiting", (row) => row("waiting"), "--line2", [6, 4]],
      ["swapped", (row) => row("swapped"), "--line3", [2, 3]],
    ],
  },
  requests: {
    unit: count, ticks: ofCount,
    lines: [
      ["ended", (row, before) => rise(row, before, ["finished", "cancelled", "failed"]), "--line1"],
      ["failed", (row, before) => rise(row, before, ["failed"]), "--line2", [6, 4]],
    ],
  },
  cpu: {
    unit: share, ticks: ofShare,
    lines: [["CPU", (row) => row("cpu_pct"), "--line1"]],
    fill: true,
  },
  ttft: {
    unit: milliseconds, ticks: ofMs,
    lines: [
      ["p50", (row) => row("ttft_ms_p50") || null, "--line1"],
      ["p99", (row) => row("ttft_ms_p99") || null, "--line2", [6, 4]],
      ["predicted", (row) => (row("ttft_error_ms_p50") ? row("ttft_predicted_ms_p50") : null), "--line3", [2, 3]],
    ],
  },
  tbt: {
    unit: milliseconds, ticks: ofMs,
    lines: [
      ["p50", (row) => row("tbt_ms_p50") || null, "--line1"],
      ["p99", (row) => row("tbt_ms_p99") || null, "--line2", [6, 4]],
    ],
  },
  kv: {
    unit: share, ticks: ofShare,
    most: 100,
    lines: [
      ["device", (row) => held(row, "", ["free", "cached", "draining"]), "--line1"],
      ["host", (row) => held(row, "host_", ["free"]), "--line3", [6, 4]],
    ],
  },
};

// Of counters, a second; null before the second row and where one began anew.
function rise(row, before, names) {
  const seconds = (row("time_ms") - before("time_ms")) / 1000;
  const more = names.reduce((total, name) => total + row(name) - before(name), 0);
  return before("time_ms") && seconds > 0 && more >= 0 ? more / seconds : null;
}

function held(row, tier, others) {
  const total = row(`${tier}blocks_total`);
  const rest = others.reduce((sum, name) => sum + row(`${tier}blocks_${name}`), 0);
  return total ? (100 * (total - rest)) / total : null;
}

export class Charts {
  constructor() {
    this.plots = [];
    this.columns = { time_ms: [] };
    const again = () => this.build();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    this.sizes = new ResizeObserver(() => this.plots.forEach(({ plot, box }) => plot.setSize(size(box))));
    this.build();
  }

  build() {
    this.sizes.disconnect();
    for (const { plot } of this.plots) plot.destroy();
    this.plots = Object.entries(CHARTS).map(([name, chart]) => {
      const box = document.getElementById(`chart-${name}`);
      const plot = new uPlot(options(chart, box), this.data(chart), box);
      this.sizes.observe(box);
      return { plot, chart, box };
    });
  }

  // Draw the last rangeS seconds.
  show(columns, rangeS) {
    this.columns = columns;
    const now = columns.time_ms.at(-1) / 1000 || Date.now() / 1000;
    for (const { plot, chart } of this.plots) {
      plot.batch(() => {
        plot.setData(this.data(chart), false);
        plot.setScale("x", { min: now - rangeS, max: now });
        const most = Math.max(0, ...plot.data.slice(1).flat().filter((value) => value !== null));
        plot.setScale("y", { min: 0, max: chart.most ?? (most ? most * 1.15 : 1) });
      });
      if (plot.cursor.idx == null) plot.setLegend({ idx: columns.time_ms.length - 1 });
    }
  }

  data(chart) {
    const times = this.columns.time_ms;
    const row = (at) => (name) => this.columns[name]?.[at] ?? 0;
    const silent = times.map((time, at) => time - times[at - 1] > SILENT_MS);
    const lines = chart.lines.map(([, value]) => times.map((_, at) => (silent[at] ? null : value(row(at), row(at - 1)))));
    return [times.map((time) => time / 1000), ...lines];
  }
}

function size(box) {
  const legend = box.querySelector(".u-legend")?.offsetHeight ?? 0; // none before the first drawing
  return { width: box.clientWidth, height: box.clientHeight - legend };
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function options(chart, box) {
  const axis = {
    stroke: colour("--soft"),
    grid: { stroke: colour("--grid"), width: 1 },
    ticks: { show: false },
    font: "12px system-ui, sans-serif",
  };
  return {
    ...size(box),
    padding: [10, 26, 0, 0],
    cursor: { y: false, drag: { x: false, y: false } },
    scales: { x: { time: true, auto: false }, y: { auto: false } },
    axes: [
      {
        ...axis, size: 28, values: ofTime,
        incrs: (plot, at, from, to) => STEPS_S.filter((step) => step < SHORT_S === isShort(from, to)),
        space: (plot, at, from, to) => (isShort(from, to) ? 58 : 44), // px, with seconds or without them
      },
      { ...axis, size: 64, space: 28, values: chart.ticks, ...(chart.whole && { incrs: WHOLE }) },
    ],
    series: [
      { label: "time", value: "{HH}:{mm}:{ss}" },
      ...chart.lines.map(([label, , line, dash]) => ({
        label,
        stroke: colour(line),
        width: 2,
        dash,
        fill: chart.fill ? `${colour(line)}22` : undefined,
        points: { show: false },
        value: (plot, value) => (value === null ? NONE : chart.unit(value)),
      })),
    ],
  };
}

// A column for each iteration, as wide as it took: prompt tokens above, decodes below, gaps where the device waited.
export function drawIterations(canvas, rows) {
  const ratio = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const left = 52;
  const most = Math.min(rows.step_us?.length ?? 0, Math.max(20, Math.floor((width - left) / 5)));
  const cut = (name) => rows[name]?.slice(-most) ?? [];
  const [idle, step, decode, prefill] = ["idle_us", "step_us", "decode", "prefill"].map(cut);
  const total = step.reduce((sum, value, at) => sum + value + idle[at], 0);
  const lanes = [
    { name: "prefill", values: prefill, top: 6, bottom: height * 0.46, colour: colour("--prefill") },
    { name: "decode", values: decode, top: height * 0.54, bottom: height - 6, colour: colour("--decode") },
  ];
  for (const lane of lanes) {
    const top = Math.max(1, ...lane.values);
    pen.fillStyle = colour("--soft");
    pen.font = "12px system-ui, sans-serif";
    pen.fillText(lane.name, 0, lane.bottom);
    pen.fillText(count(Math.max(0, ...lane.values)), 0, lane.top + 10);
    pen.fillStyle = colour("--grid");
    pen.fillRect(left, lane.bottom, width - left, 1);
    let x = left;
    lane.values.forEach((tokens, at) => {
      const pause = ((width - left) * idle[at]) / total;
      const wide = ((width - left) * step[at]) / total;
      pen.fillStyle = colour("--idle");
      if (pause >= 0.5) pen.fillRect(x, lane.bottom - 5, pause, 5);
      x += pause;
      pen.fillStyle = lane.colour;
      const high = ((lane.bottom - lane.top) * tokens) / top;
      pen.fillRect(x, lane.bottom - high, Math.max(0.5, wide - (wide > 3 ? 1 : 0)), high);
      x += wide;
    });
  }
  return { shown: step.length, total_us: total, idle_us: idle.reduce((sum, value) => sum + value, 0), decode, prefill };
}
