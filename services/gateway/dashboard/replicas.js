// A row for each replica: sequences, blocks and speed. Text from outside only ever becomes textContent.

import { count, measured, NONE, percent } from "./format.js";

const by = (id) => document.getElementById(id);

export function replicas(shards) {
  const found = Object.entries(shards).flatMap(([shard, state]) =>
    Object.entries(state.replicas ?? {}).map(([name, figures]) => ({ shard, name, figures })),
  );
  const several = Object.keys(shards).length > 1;
  by("replicas").replaceChildren(...found.map((one) => row(one, several)));
  by("replicas-none").hidden = found.length > 0;
}

function row({ shard, name, figures }, several) {
  const line = document.createElement("tr");
  const head = document.createElement("th");
  head.scope = "row";
  const about = document.createElement("small");
  about.textContent = [figures.state, figures.dock ? "quarantine" : "", figures.role, several ? shard : "", `epoch ${figures.epoch}`].filter(Boolean).join(" · ");
  about.className = figures.state === "serving" && !figures.dock ? "" : "warn";
  head.append(name, about);
  const loading = figures.loading ? `, ${count(figures.loading)} wait for KV` : "";
  line.append(
    head,
    meter("sequences", figures.slots, { used: figures.running }, `${count(figures.running)} of ${count(figures.slots)}${loading}`),
    tier("KV on the device", figures, ""),
    tier("KV on the host", figures, "host_"),
    cell("tokens/s", count(figures.tok_s)),
    cell("step", measured(figures.step_ms)),
    cell("idle", percent(figures.idle_pct, 100)),
    cell("in flight", count(figures.in_flight)),
    cell("prefix hits", count(figures.prefix_hit_tokens)),
  );
  return line;
}

function tier(label, figures, name) {
  const of = (state) => Number(figures[`${name}blocks_${state}`]) || 0;
  const rest = { cached: of("cached"), draining: of("draining") };
  const used = of("total") - of("free") - rest.cached - rest.draining;
  const text = of("total") ? `${percent(used, of("total"))} of ${count(of("total"))}` : NONE;
  return meter(label, of("total"), { used, ...rest }, text);
}

function meter(label, total, parts, text) {
  const found = cell(label, text);
  if (!total) return found;
  const bar = document.createElement("div");
  bar.className = "bar slim";
  for (const [part, value] of Object.entries(parts)) {
    const piece = document.createElement("i");
    piece.className = part;
    piece.style.width = `${(100 * value) / total}%`;
    bar.append(piece);
  }
  found.append(bar);
  return found;
}

function cell(label, text) {
  const found = document.createElement("td");
  found.dataset.label = label; // the heading, where there is no room for one
  found.textContent = text;
  return found;
}
