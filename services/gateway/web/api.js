// Talk to the server: the key of this tab, refusals in the server's words, events of a stream.

const KEY = "orcinus-key"; // the live page uses the same name

export class ServerError extends Error {
  constructor(message, status, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function giveKey(key) {
  sessionStorage.setItem(KEY, key);
}

// Return the answer. Throw ServerError with the server's sentence for a refusal, or if there is no connection.
export async function ask(path, body = null, signal = null) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, cache: "no-store" };
  if (body) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["Content-Type"] = "application/json";
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError("No connection to the server; is it running?", 0);
  }
  if (answer.ok) return answer;
  if (answer.status === 401) sessionStorage.removeItem(KEY);
  let error = { message: `the server answers ${answer.status}` };
  try {
    error = (await answer.json()).error;
  } catch {
    // not in OpenAI's shape, as from a proxy
  }
  throw new ServerError(answer.status === 401 && !key ? "" : error.message, answer.status, error.code);
}

// Yield the JSON of each event until [DONE]. Throw ServerError for an error event and for a stream that breaks off.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await broken(reader.read());
      if (done) throw new ServerError("The connection ended before the answer did.", 0);
      const parts = (held + value).split(/\r?\n\r?\n/);
      held = parts.pop();
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (!data.length) continue; // a comment that keeps the connection open
        const text = data.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
        if (text === "[DONE]") return;
        const event = JSON.parse(text);
        if (event.error) throw new ServerError(event.error.message, 0);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function broken(reading) {
  try {
    return await reading;
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError("The connection broke off.", 0);
  }
}
