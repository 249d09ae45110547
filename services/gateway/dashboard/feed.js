// Read the events of the gateway, over fetch and not EventSource: a key needs a header, and a refusal has a reason.

const AGAIN_MS = [500, 1000, 2000, 5000];
const SILENT_MS = 5000; // frames come each second
const KEY = "orcinus-key";

export function giveKey(key) {
  sessionStorage.setItem(KEY, key);
}

// Calls on.past, on.now, on.lost(why) and on.refused(why) until the page is closed.
export async function follow(address, on) {
  for (let attempt = 0; ; attempt++) {
    try {
      await read(address, {
        ...on,
        now: (frame) => {
          attempt = 0;
          on.now(frame);
        },
      });
      on.lost("the gateway ended the connection");
    } catch (error) {
      if (error.refused) {
        sessionStorage.removeItem(KEY);
        await on.refused(error.message);
        continue;
      }
      on.lost(error.name === "AbortError" ? "the gateway is silent" : error.message);
    }
    await new Promise((done) => setTimeout(done, AGAIN_MS[Math.min(attempt, AGAIN_MS.length - 1)]));
  }
}

// Return the columns of the charts by shard, of the last `seconds`.
export async function readHistory(seconds) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch(`/dashboard/history?seconds=${seconds}`, { headers, cache: "no-store" });
  if (!answer.ok) throw new Error(await reason(answer));
  return answer.json();
}

async function read(address, on) {
  const gone = new AbortController();
  const key = sessionStorage.getItem(KEY);
  let silent = setTimeout(() => gone.abort(), SILENT_MS);
  try {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const answer = await fetch(address, { headers, signal: gone.signal, cache: "no-store" });
    if (answer.status === 401) throw Object.assign(new Error(key ? "the key is not valid" : ""), { refused: true });
    if (answer.status === 403) throw Object.assign(new Error(await reason(answer)), { refused: true });
    if (!answer.ok) throw new Error(await reason(answer));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let held = ""; ; ) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(silent);
      silent = setTimeout(() => gone.abort(), SILENT_MS);
      const events = (held + value).split("\n\n");
      held = events.pop();
      for (const event of events) deliver(event, on);
    }
  } finally {
    clearTimeout(silent);
  }
}

function deliver(event, on) {
  const [, name, data] = /^event: (\w+)\ndata: (.*)$/s.exec(event) ?? [];
  if (name === "past") on.past(JSON.parse(data));
  if (name === "now") on.now(JSON.parse(data));
}

async function reason(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the gateway answers ${answer.status}`;
  }
}
