// Write frames of the feed into the page. Text from outside only ever becomes textContent.

import { Charts, drawIterations } from "./charts.js";
import { follow, giveKey, readHistory } from "./feed.js";
import { bytes, clock, count, measured, milliseconds, NONE, percent } from "./format.js";
import { replicas } from "./replicas.js";

const CLASSES = ["realtime", "high", "normal", "low"];
const SILENT_MS = 5000; // of a shard's statistics
const SENT_S = 300; // of history that the events begin with
const by = (id) => document.getElementById(id);
const sum = (list, name) => list.reduce((total, stats) => total + (Number(stats[name]) || 0), 0);

const past = {}; // shard -> columns
let charts;
let rangeS = 300; // of the charts
let last; // the frame on the page

function say(id, text) {
  const element = by(id);
  if (element.textContent !== String(text)) element.textContent = text;
}

function fill(tag, texts, names = []) {
  const element = document.createElement(tag);
  texts.forEach((text, at) => {
    const cell = document.createElement(at === 0 && tag === "tr" ? "th" : tag === "tr" ? "td" : "span");
    if (cell.tagName === "TH") cell.scope = "row";
    cell.textContent = text;
    cell.className = names[at] ?? "";
    element.append(cell);
  });
  return element;
}

// Cells get the heading of their column, for phones, where a row is a block.
function fillTable(id, rows) {
  const [headings] = by(id).closest("table").tHead.rows;
  for (const row of rows) [...row.cells].forEach((cell, at) => (cell.dataset.label = headings.cells[at].textContent));
  by(id).replaceChildren(...rows);
}

function state(name, text, banner = "", kind = "") {
  by("state").dataset.state = name;
  say("state", text);
  by("banner").hidden = !banner;
  by("banner").dataset.kind = kind;
  say("banner", banner);
  by("main").classList.toggle("stale", name === "lost");
}

function remember(columns, stats) {
  const times = columns.time_ms ?? (columns.time_ms = []);
  if (stats.time_ms <= times.at(-1)) return;
  for (const name of new Set([...Object.keys(columns), ...Object.keys(stats)])) {
    if (name === "time_ms" || typeof (stats[name] ?? 0) !== "number") continue;
    (columns[name] ??= Array(times.length).fill(0)).push(stats[name] ?? 0);
  }
  times.push(stats.time_ms);
  const late = times.findIndex((time) => time > stats.time_ms - 1000 * rangeS);
  if (late > 0) for (const column of Object.values(columns)) column.splice(0, late);
}

function choose(shards) {
  const names = Object.keys(shards).sort();
  const select = by("shard");
  if (names.join() !== [...select.options].map((option) => option.value).join()) {
    const before = select.value;
    select.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(before)) select.value = before;
  }
  by("shard-choice").hidden = names.length < 2;
  return select.value;
}

function show(frame) {
  if (frame.error) {
    const since = last ? ` The figures are from ${clock(last.time_ms)}.` : "";
    state("lost", "no Redis", `${frame.error}.${since}`);
    return;
  }
  last = frame;
  say("model", frame.model);
  const all = Object.values(frame.shards).map((shard) => shard.stats);
  const name = choose(frame.shards);
  const stats = frame.shards[name]?.stats ?? {};
  say("policy", stats.policy ? ` · policy ${stats.policy}` : "");
  condition(frame, name, all);
  tiles(frame, all);
  tiers(all);
  classes(all);
  totals(all);
  replicas(frame.shards);
  processes(frame);
  events(frame.events);
  iterations(frame.shards[name]?.iterations ?? {}, stats);
  if (name) {
    for (const [shard, state] of Object.entries(frame.shards)) remember((past[shard] ??= {}), state.stats);
    charts.show(past[name], rangeS);
  }
}

function condition(frame, name, all) {
  const shard = frame.shards[name];
  if (!shard) {
    state("waiting", "no scheduler", `No scheduler has reported on ${frame.model} in the last five minutes.`, "empty");
  } else if (!shard.led) {
    state("lost", "no scheduler", `No scheduler leads ${name}. Its last figures are from ${clock(shard.stats.time_ms)}.`);
  } else if (frame.time_ms - shard.stats.time_ms > SILENT_MS + 1000) {
    state("lost", "silent", `The scheduler of ${name} has been silent since ${clock(shard.stats.time_ms)}.`);
  } else if (!frame.workers.some((worker) => worker.alive)) {
    noWorker(frame);
  } else {
    state(sum(all, "running") + sum(all, "waiting") ? "live" : "idle", sum(all, "running") ? "live" : "idle");
  }
}

// Without a worker; `awake` is there where a placer lets models take turns.
function noWorker(frame) {
  if (frame.awake === false) {
    state("idle", "asleep", `${frame.model} sleeps, as other models have their turn: a request wakes it.`, "empty");
  } else if (frame.awake) {
    state("waiting", "loading", `${frame.model} has its turn, and its worker loads: requests wait.`, "empty");
  } else {
    state("waiting", "no worker", "No worker is registered: requests wait.", "empty");
  }
}

function tiles(frame, all) {
  const worst = (name) => Math.max(0, ...all.map((stats) => Number(stats[name]) || 0));
  const [running, waiting] = [sum(all, "running"), sum(all, "waiting")];
  say("tok-s", count(sum(all, "tok_s")));
  say("tok-total", `${count(sum(all, "tokens_total"))} in all`);
  say("ttft", measured(worst("ttft_ms_p50")));
  say("ttft-p99", `p99 ${measured(worst("ttft_ms_p99"))}`);
  forecast(all);
  requests(frame);
  say("tbt", measured(worst("tbt_ms_p50")));
  say("tbt-p99", `p99 ${measured(worst("tbt_ms_p99"))}`);
  say("running", count(running));
  say("running-sub", `step ${measured(worst("step_ms"))}, ${count(sum(all, "in_flight"))} in flight`);
  say("waiting", count(waiting));
  say("waiting-sub", `${count(sum(all, "swapped"))} swapped, ${count(sum(all, "parked"))} parked`);
  const total = sum(all, "blocks_total");
  const used = total - sum(all, "blocks_free") - sum(all, "blocks_cached") - sum(all, "blocks_draining");
  say("kv", percent(used, total));
  say("kv-sub", `${count(used)} of ${count(total)} blocks`);
  document.title = `${count(sum(all, "tok_s"))} tok/s · Orcinus`;
}

// Red is an error that counts: more than half of the time, and long enough to be felt.
const isFarOff = (error, real) => error > Math.max(real / 2, 50);

// The shard with the predictions that are furthest off speaks for all: an average would hide it.
function forecast(all) {
  const seen = all.filter((stats) => Number(stats.ttft_error_ms_p50) > 0);
  const far = seen.sort((a, b) => b.ttft_error_ms_p50 - a.ttft_error_ms_p50)[0];
  const [predicted, real, error] = ["ttft_predicted_ms_p50", "ttft_ms_p50", "ttft_error_ms_p50"].map((name) => Number(far?.[name]) || 0);
  say("ttft-predicted", far ? milliseconds(predicted) : NONE);
  say("ttft-error", far ? `error ${milliseconds(error)}, ${percent(error, real)}` : "none to compare in the last minute");
  by("ttft-error").classList.toggle("bad", isFarOff(error, real));
  say(
    "ttft-check",
    far
      ? `Predicted ${milliseconds(predicted)}, measured ${milliseconds(real)}, error ${milliseconds(error)}: medians of the last minute.`
      : "Predictions cannot be compared: no request of the last minute counts, as the first of a scheduler does not.",
  );
}

function requests(frame) {
  const ended = { finished: 0, cancelled: 0, failed: 0 };
  for (const name of Object.keys(frame.shards)) {
    for (const field of Object.keys(ended)) ended[field] += recent(past[name], field, frame.shards[name].stats);
  }
  say("rps", count(ended.finished + ended.cancelled + ended.failed));
  say("errors", `${count(ended.failed)} failed, ${count(ended.cancelled)} cancelled a second`);
  by("errors").classList.toggle("bad", ended.failed > 0);
}

// The rise of a counter a second over the last ten seconds; a counter that fell began anew.
function recent(columns, field, stats) {
  const times = columns?.time_ms ?? [];
  const at = times.findIndex((time) => time >= stats.time_ms - 10_000);
  if (at < 0 || times[at] >= stats.time_ms) return 0;
  const rise = (Number(stats[field]) || 0) - (columns[field]?.[at] ?? 0);
  return (1000 * Math.max(0, rise)) / (stats.time_ms - times[at]);
}

function tiers(all) {
  tier("device", sum(all, "blocks_total"), {
    cached: sum(all, "blocks_cached"), draining: sum(all, "blocks_draining"), free: sum(all, "blocks_free"),
  });
  tier("host", sum(all, "host_blocks_total"), { free: sum(all, "host_blocks_free") });
}

function tier(name, total, rest) {
  const used = total - Object.values(rest).reduce((part, value) => part + value, 0);
  const parts = { used, ...rest };
  const text = Object.entries(parts).filter(([part, value]) => value || part === "used");
  say(`${name}-tier`, total ? `${text.map(([part, value]) => `${count(value)} ${part === "used" ? "in use" : part}`).join(", ")} of ${count(total)}` : "none");
  by(`${name}-bar`).replaceChildren(
    ...Object.entries(parts).filter(([part]) => total && part !== "free").map(([part, value]) => {
      const piece = document.createElement("i");
      piece.className = part;
      piece.style.width = `${(100 * value) / total}%`;
      return piece;
    }),
  );
}

function classes(all) {
  fillTable(
    "classes",
    CLASSES.map((name) => {
      const missed = sum(all, `slo_violations_${name}`);
      const predicted = all.length ? Math.min(...all.map((stats) => Number(stats[`predicted_ttft_ms_${name}`]) || 0)) : 0;
      const worst = (field) => Math.max(0, ...all.map((stats) => Number(stats[`${field}_${name}`]) || 0));
      const [before, real, error] = ["ttft_predicted_ms_p50", "ttft_ms_p50", "ttft_error_ms_p50"].map(worst);
      const row = [
        name, count(sum(all, `waiting_${name}`)), all.length ? milliseconds(predicted) : NONE,
        real ? milliseconds(before) : NONE, measured(real), measured(error), count(missed),
      ];
      return fill("tr", row, ["", "", "", "", "", isFarOff(error, real) ? "bad" : "", missed ? "bad" : ""]);
    }),
  );
}

function totals(all) {
  const named = {
    finished: "finished", cancelled: "cancelled", failed: "failed", preemptions: "preempted",
    recomputed_tokens: "tokens recomputed", swapped_blocks: "blocks swapped", prefix_hit_tokens: "prefix hits, tokens",
    drafted_tokens: "tokens guessed", accepted_tokens: "guesses right",
  };
  const shown = Object.entries(named).map(([field, text]) => [text, count(sum(all, field))]);
  const [drafted, accepted, produced] = ["drafted_tokens", "accepted_tokens", "tokens_total"].map((field) => sum(all, field));
  if (drafted && produced > accepted) {
    shown.push(["guesses refused", percent(drafted - accepted, drafted)]);
    shown.push(["tokens a sequence and step", (produced / (produced - accepted)).toFixed(2)]);
  }
  by("totals").replaceChildren(
    ...shown.map(([text, figure]) => {
      const pair = document.createElement("div");
      const [term, value] = [document.createElement("dt"), document.createElement("dd")];
      [term.textContent, value.textContent] = [text, figure];
      pair.append(term, value);
      return pair;
    }),
  );
}

function processes(frame) {
  const rows = frame.workers.map((worker) => [
    worker.id,
    worker.alive ? "alive" : `silent for ${Math.round(worker.seen_s)} s`,
    ...usage(worker),
    worker.alive ? `worker of ${worker.shard || "no shard yet"}: ${worker.device}, ${worker.backend} kernels, ${worker.dtype}, step ${count(worker.last_step)}` : "worker",
    worker.alive,
  ]);
  const leaders = Object.entries(frame.shards).filter(([, shard]) => shard.led);
  for (const one of frame.schedulers) {
    const [, leader] = leaders.find(([, shard]) => frame.schedulers.length === 1 || shard.stats.last_step === one.last_step) ?? [];
    rows.push([one.id, "alive", ...usage(leader?.stats), `scheduler, step ${count(one.last_step)}`, true]);
  }
  for (const one of frame.gateways) {
    rows.push([one.id, "alive", ...usage(one.id === frame.gateway?.id ? frame.gateway : undefined), `gateway, ${count(one.active)} ${one.active === 1 ? "request" : "requests"}`, true]);
  }
  const { used_bytes: used, most_bytes: most } = frame.redis;
  rows.push(["redis", "alive", ...usage(frame.redis), most ? `${bytes(used)} of ${bytes(most)}` : bytes(used), true]);
  fillTable(
    "processes",
    rows.map(([id, words, cpu, memory, what, alive]) =>
      fill("tr", [id, words, cpu, memory, what], ["", alive ? "good" : "bad"]),
    ),
  );
}

// CPU and memory that a process published of itself.
function usage(figures) {
  return figures?.rss_bytes ? [`${count(figures.cpu_pct)} %`, bytes(figures.rss_bytes)] : [NONE, NONE];
}

function events(list) {
  const rows = list.map((event) => {
    const row = document.createElement("li");
    const [time, kind] = [document.createElement("time"), document.createElement("b")];
    time.textContent = clock(Number(event.time_ms));
    kind.textContent = event.kind;
    row.append(time, kind, String(event.text ?? ""));
    return row;
  });
  by("events").replaceChildren(...(rows.length ? rows : [fill("li", ["No events: no worker was lost, no policy changed."])]));
}

function iterations(rows, stats) {
  const canvas = by("iterations");
  if (!rows.last) return;
  const seen = drawIterations(canvas, rows);
  const mean = (values) => values.reduce((total, value) => total + value, 0) / Math.max(1, values.length);
  const text =
    `The last ${seen.shown} iterations took ${milliseconds(seen.total_us / 1000)}; the device was idle for ` +
    `${percent(seen.idle_us, seen.total_us)} of it. On average ${count(mean(seen.decode))} sequences decoded and ` +
    `${count(mean(seen.prefill))} prompt tokens ran in each.`;
  say("iterations-sub", stats.running ? text : `${text} Nothing runs now.`);
  canvas.setAttribute("aria-label", text);
}

function lost(why) {
  const since = last ? ` The figures are from ${clock(last.time_ms)}.` : "";
  state("lost", "disconnected", `No connection to the gateway: ${why}; trying again.${since}`);
}

function refused(why) {
  by("key-form").hidden = false;
  state("waiting", "key needed", why, "empty");
  return new Promise((done) => {
    by("key-form").onsubmit = (submit) => {
      submit.preventDefault();
      giveKey(by("key").value);
      by("key-form").hidden = true;
      done();
    };
  });
}

async function chooseRange() {
  const wanted = Number(by("range").value);
  try {
    for (const [name, columns] of Object.entries(await readHistory(wanted))) past[name] = columns;
    rangeS = wanted;
  } catch (error) {
    by("range").value = rangeS;
    lost(error.message);
    return;
  }
  if (last) show(last);
}

addEventListener("DOMContentLoaded", () => {
  charts = new Charts();
  by("shard").addEventListener("change", () => last && show(last));
  by("range").addEventListener("change", chooseRange);
  addEventListener("resize", () => last && show(last));
  follow("/dashboard/events", {
    past: (shards) => {
      for (const [name, columns] of Object.entries(shards)) past[name] = columns;
      if (rangeS > SENT_S) chooseRange(); // again: the gateway sends five minutes
    },
    now: show,
    lost,
    refused,
  });
});
