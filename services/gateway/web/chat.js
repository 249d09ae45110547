// Hold a conversation: turns of a question and its answer, kept in this tab. Text of the model only becomes text nodes.

import { ask, events, ServerError } from "./api.js";
import { withKey } from "./key.js";
import { copyButton, Markdown } from "./markdown.js";

const TURNS = "orcinus-turns";
const SETTINGS = "orcinus-settings";
const MAX_TURNS = 200; // kept over a reload
const MAX_CHARACTERS = 1_000_000;
const DEMO_MODEL = "demo-model";
const by = (id) => document.getElementById(id);

const turns = []; // {question, answer, thinking, note, error}
const views = []; // what shows each turn
let running = null; // the AbortController of the answer that runs

function stored(name, otherwise) {
  try {
    return JSON.parse(sessionStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function keep() {
  let kept = turns.slice(-MAX_TURNS);
  for (;;) {
    const text = JSON.stringify(kept);
    try {
      if (text.length > MAX_CHARACTERS) throw new Error("too long");
      sessionStorage.setItem(TURNS, text);
      return;
    } catch {
      if (!kept.length) return;
      kept = kept.slice(Math.ceil(kept.length / 4)); // the oldest are forgotten first
    }
  }
}

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function button(text, run) {
  const made = element("button", "", text);
  made.type = "button";
  made.addEventListener("click", run);
  return made;
}

class View {
  constructor(turn) {
    this.turn = turn;
    this.mine = element("article", "mine");
    this.mine.setAttribute("aria-label", "You");
    this.mine.append(element("p", "", turn.question));
    this.answer = element("article", "answer");
    this.answer.setAttribute("aria-label", "Answer");
    this.thinking = element("details", "thinking");
    this.thought = element("p", "");
    this.thinking.append(element("summary", "", "Thinking"), this.thought);
    this.text = element("div", "text");
    this.error = element("p", "error");
    this.error.setAttribute("role", "alert");
    this.foot = element("div", "foot");
    this.answer.append(this.thinking, this.text, this.error, this.foot);
    this.markdown = new Markdown(this.text);
    by("log").append(this.mine, this.answer);
    this.show();
  }

  show() {
    const { answer, thinking, error, note } = this.turn;
    const isRunning = running !== null && turns.at(-1) === this.turn;
    const follows = nearEnd();
    this.text.setAttribute("aria-busy", String(isRunning)); // read out when it is complete
    this.thinking.hidden = !thinking;
    if (this.thought.textContent !== thinking) this.thought.textContent = thinking ?? "";
    this.thinking.firstChild.textContent = isRunning && !answer ? "Thinking…" : "Thinking";
    this.markdown.show(answer);
    this.error.hidden = !error;
    if (this.error.textContent !== error) this.error.textContent = error;
    const isLast = turns.at(-1) === this.turn;
    const again = isLast ? [this.turn.isFull ? button("New chat", clear) : button(error ? "Try again" : "Answer again", repeat)] : [];
    this.foot.replaceChildren(
      ...(isRunning ? [] : [...(answer ? [copyButton(() => this.turn.answer, "Copy answer")] : []), ...again, element("span", "note", note)]),
    );
    if (follows) toEnd();
  }

  remove() {
    this.mine.remove();
    this.answer.remove();
  }
}

function nearEnd() {
  const main = by("main");
  return main.scrollHeight - main.scrollTop - main.clientHeight < 80;
}

function toEnd() {
  by("main").scrollTop = by("main").scrollHeight;
}

function say(banner) {
  by("banner").hidden = !banner;
  by("banner").textContent = banner;
}

function setRunning(controller) {
  running = controller;
  const focused = document.activeElement;
  by("send").hidden = running !== null;
  by("stop").hidden = running === null;
  by("new").disabled = running !== null;
  if (focused === by("stop") || focused === by("send")) by("prompt").focus();
}

function showEmpty() {
  by("empty").hidden = turns.length > 0;
}

// Messages to send: what was asked without an answer is left out, since roles take turns.
function messages() {
  const system = by("system").value.trim();
  const said = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns.slice(0, -1)) {
    if (turn.answer) said.push({ role: "user", content: turn.question }, { role: "assistant", content: turn.answer });
  }
  said.push({ role: "user", content: turns.at(-1).question });
  return said;
}

function parameters() {
  const found = {};
  for (const field of document.querySelectorAll("input[data-setting]")) {
    if (field.value !== "" && Number.isFinite(field.valueAsNumber)) found[field.dataset.setting] = field.valueAsNumber;
  }
  return found;
}

async function answer() {
  const turn = turns.at(-1);
  const view = views.at(-1);
  const controller = new AbortController();
  Object.assign(turn, { answer: "", thinking: "", note: "", error: "", isFull: false });
  setRunning(controller);
  if (!by("model").value) await models(); // the server was not there when the page was opened
  by("state").textContent = "Waiting for the first token";
  view.show();
  views.at(-2)?.show(); // only the last turn can be answered again
  const measured = new Measured();
  let state = "The answer is complete";
  try {
    await withKey(async () => {
      measured.start();
      const body = { model: by("model").value, messages: messages(), ...parameters(), stream: true };
      const reply = await ask("/v1/chat/completions", { ...body, stream_options: { include_usage: true } }, controller.signal);
      let drawing = 0;
      for await (const event of events(reply)) {
        if (event.usage) measured.tokens = event.usage.completion_tokens;
        const choice = event.choices?.[0];
        if (!choice) continue;
        measured.reason = choice.finish_reason ?? measured.reason;
        const text = choice.delta?.content ?? "";
        const thought = choice.delta?.reasoning_content ?? "";
        if (!text && !thought) continue;
        measured.first();
        turn.thinking = (turn.thinking + thought).replace(/^\n+/, "");
        turn.answer = turn.thinking ? (turn.answer + text).replace(/^\n+/, "") : turn.answer + text;
        by("state").textContent = turn.answer ? "Answering" : "Thinking";
        drawing ||= requestAnimationFrame(() => {
          drawing = 0;
          view.show();
        });
      }
    });
    turn.note = turn.answer || turn.thinking ? measured.text() : "the answer is empty";
    if (measured.reason === "length") state = "The answer was cut";
  } catch (error) {
    state = error.name === "AbortError" ? "The answer was stopped" : "The answer failed";
    if (error.name === "AbortError") turn.note = `stopped by you${measured.text() && `, ${measured.text()}`}`;
    else turn.error = error instanceof ServerError ? error.message : `The page failed: ${error.message}`;
    turn.isFull = error.code === "context_length_exceeded" && turns.length > 1;
  }
  setRunning(null);
  by("state").textContent = state;
  view.show();
  keep();
}

class Measured {
  start() {
    this.started = performance.now();
    this.began = 0;
    this.tokens = 0;
    this.reason = "";
  }

  first() {
    this.began ||= performance.now();
  }

  text() {
    if (!this.began) return "";
    const now = performance.now();
    const parts = [`first token ${seconds(this.began - this.started)}`];
    if (this.tokens) parts.unshift(`${this.tokens} ${this.tokens === 1 ? "token" : "tokens"}`);
    const elapsed = now - this.began;
    if (this.tokens > 1 && elapsed > 50) parts.push(`${Math.round((1000 * (this.tokens - 1)) / elapsed)} tokens/s`);
    if (this.reason === "length") parts.push("cut at the limit of tokens");
    return parts.join(", ");
  }
}

function seconds(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}

function send() {
  const question = by("prompt").value.trim();
  if (!question || running) return;
  by("prompt").value = "";
  grow();
  const turn = { question, answer: "", thinking: "", note: "", error: "" };
  turns.push(turn);
  views.push(new View(turn));
  showEmpty();
  toEnd();
  answer();
}

function repeat() {
  if (running) return;
  by("prompt").focus();
  answer();
}

function stop() {
  running?.abort();
}

function clear() {
  if (running) return;
  for (const view of views) view.remove();
  turns.length = views.length = 0;
  keep();
  say("");
  by("state").textContent = "";
  showEmpty();
  by("prompt").focus();
}

function grow() {
  const prompt = by("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function showSettings(isOpen) {
  by("settings").hidden = !isOpen;
  by("settings-button").setAttribute("aria-expanded", String(isOpen));
  (isOpen ? by("system") : by("settings-button")).focus();
}

async function models() {
  try {
    const { data } = await withKey(async () => (await ask("/v1/models")).json());
    const before = stored(SETTINGS, {}).model;
    by("model").replaceChildren(...data.map((model) => new Option(model.id, model.id)));
    if (data.some((model) => model.id === before)) by("model").value = before;
    const describe = () => {
      const model = data.find((one) => one.id === by("model").value);
      by("empty-model").textContent = model?.id ?? "the model";
      by("toy").hidden = model?.id !== DEMO_MODEL;
      const most = model?.max_model_len;
      by("context").textContent = most ? `The context holds ${most.toLocaleString("en")} tokens.` : "";
    };
    by("model").addEventListener("change", describe);
    describe();
    say("");
  } catch (error) {
    say(error.message);
  }
  showEmpty();
}

function remember() {
  const kept = { model: by("model").value };
  for (const field of document.querySelectorAll("[data-setting]")) kept[field.dataset.setting] = field.value;
  sessionStorage.setItem(SETTINGS, JSON.stringify(kept));
}

// The live page is on this port where a key protects it, else on the ops port, to which the server redirects.
async function openLive(click) {
  if (click.ctrlKey || click.metaKey || click.shiftKey) return;
  click.preventDefault();
  const answer = await fetch("/dashboard", { redirect: "manual", cache: "no-store" }).catch(() => null);
  if (answer?.ok || answer?.type === "opaqueredirect") {
    location.assign("/dashboard");
    return;
  }
  const why = await answer?.json().then((body) => body.error.message).catch(() => "");
  say(`The live page cannot be reached from here: ${why || "no connection to the server"}`);
}

function onKey(event) {
  if (event.key !== "Escape" || by("key-dialog").open) return;
  if (running) stop();
  else if (!by("settings").hidden) showSettings(false);
}

function main() {
  const settings = stored(SETTINGS, {});
  for (const field of document.querySelectorAll("[data-setting]")) field.value = settings[field.dataset.setting] ?? "";
  for (const turn of stored(TURNS, [])) {
    turns.push(turn);
    views.push(new View(turn));
  }
  views.forEach((view) => view.show());
  toEnd();
  by("composer").addEventListener("submit", (submit) => {
    submit.preventDefault();
    send();
  });
  by("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  by("prompt").addEventListener("input", grow);
  by("suggestion").addEventListener("click", () => {
    by("prompt").value = by("suggestion").textContent;
    send();
  });
  by("stop").addEventListener("click", stop);
  by("new").addEventListener("click", clear);
  by("settings-button").addEventListener("click", () => showSettings(by("settings").hidden));
  by("settings-close").addEventListener("click", () => showSettings(false));
  for (const link of document.querySelectorAll("#live, [data-live]")) link.addEventListener("click", openLive);
  addEventListener("change", remember);
  addEventListener("pagehide", keep);
  document.addEventListener("keydown", onKey);
  models();
}

main();
