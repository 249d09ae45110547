// Write frames of the feed into the page. Text from outside only ever becomes textContent.

import { Charts, drawIterations } from "./charts.js";
import { follow, giveKey } from "./feed.js";
import { bytes, clock, count, measured, milliseconds, NONE, percent } from "./format.js";
import { replicas } from "./replicas.js";

const CLASSES = ["realtime", "high", "normal", "low"];
const WINDOW_MS = 300_000;
const SILENT_MS = 5000; // of a shard's statistics
const by = (id) => document.getElementById(id);
const sum = (list, name) => list.reduce((total, stats) => total + (Number(stats[name]) || 0), 0);

const past = {}; // shard -> columns
let charts;
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
  const late = times.findIndex((time) => time > stats.time_ms - WINDOW_MS);
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
    charts.show(past[name]);
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
    state("waiting", "no worker", "No worker is registered: requests wait.", "empty");
  } else {
    state(sum(all, "running") + sum(all, "waiting") ? "live" : "idle", sum(all, "running") ? "live" : "idle");
  }
}

function tiles(frame, all) {
  const worst = (name) => Math.max(0, ...all.map((stats) => Number(stats[name]) || 0));
  const [running, waiting] = [sum(all, "running"), sum(all, "waiting")];
  say("tok-s", count(sum(all, "tok_s")));
  say("tok-total", `${count(sum(all, "tokens_total"))} in all`);
  say("ttft", measured(worst("ttft_ms_p50")));
  say("ttft-p99", `p99 ${measured(worst("ttft_ms_p99"))}`);
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
  by("classes").replaceChildren(
    ...CLASSES.map((name) => {
      const missed = sum(all, `slo_violations_${name}`);
      const predicted = all.length ? Math.min(...all.map((stats) => Number(stats[`predicted_ttft_ms_${name}`]) || 0)) : 0;
      const row = [name, count(sum(all, `waiting_${name}`)), all.length ? milliseconds(predicted) : NONE, count(missed)];
      return fill("tr", row, ["", "", "", missed ? "bad" : ""]);
    }),
  );
}

function totals(all) {
  const named = {
    finished: "finished", cancelled: "cancelled", failed: "failed", preemptions: "preempted",
    recomputed_tokens: "tokens recomputed", swapped_blocks: "blocks swapped", prefix_hit_tokens: "prefix hits, tokens",
  };
  by("totals").replaceChildren(
    ...Object.entries(named).map(([field, text]) => {
      const pair = document.createElement("div");
      const [term, value] = [document.createElement("dt"), document.createElement("dd")];
      term.textContent = text;
      value.textContent = count(sum(all, field));
      pair.append(term, value);
      return pair;
    }),
  );
}

function processes(frame) {
  const rows = frame.workers.map((worker) => [
    worker.id,
    worker.alive ? "alive" : `silent for ${Math.round(worker.seen_s)} s`,
    worker.alive ? `worker of ${worker.shard || "no shard yet"}: ${worker.device}, ${worker.backend} kernels, ${worker.dtype}, step ${count(worker.last_step)}` : "worker",
    worker.alive,
  ]);
  for (const one of frame.schedulers) rows.push([one.id, "alive", `scheduler, step ${count(one.last_step)}`, true]);
  for (const one of frame.gateways) rows.push([one.id, "alive", `gateway, ${count(one.active)} requests`, true]);
  const { used_bytes: used, most_bytes: most } = frame.redis;
  rows.push(["redis", "alive", most ? `${bytes(used)} of ${bytes(most)}` : bytes(used), true]);
  by("processes").replaceChildren(
    ...rows.map(([id, words, what, alive]) => fill("tr", [id, words, what], ["", alive ? "good" : "bad"])),
  );
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

addEventListener("DOMContentLoaded", () => {
  charts = new Charts();
  by("shard").addEventListener("change", () => last && show(last));
  addEventListener("resize", () => last && show(last));
  follow("/dashboard/events", {
    past: (shards) => {
      for (const [name, columns] of Object.entries(shards)) past[name] = columns;
    },
    now: show,
    lost,
    refused,
  });
});
