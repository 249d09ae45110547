// The official JavaScript client. `node suite_openai.mjs URL KEY MODEL LIMITED`, inside .clients/javascript; LIMITED: a key
// that may send 30 requests a minute.
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI, { toFile } from "openai";

const [url, key, model, limited] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const stranger = client.withOptions({ apiKey: "wrong" });
const chat = [{ role: "user", content: "Write a function that adds two numbers." }];
const greedy = { model, max_tokens: 12, temperature: 0 };

async function plain(path, body) {
  const headers = { Authorization: `Bearer ${key}`, "Content-Type": "application/json" };
  return (await fetch(url + path, { method: "POST", headers, body: JSON.stringify(body) })).json();
}

async function ended(id) {
  const deadline = Date.now() + 60_000;
  for (;;) {
    const answer = await fetch(`${url}/v1/requests/${id}`, { headers: { Authorization: `Bearer ${key}` } });
    const found = await answer.json();
    if (found.status === "finished") return found;
    assert.ok(Date.now() < deadline, `${id} has not ended`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

const said = (await plain("/v1/chat/completions", { ...greedy, messages: chat })).choices[0].message.content;
const continued = (await plain("/v1/completions", { ...greedy, prompt: "def add(" })).choices[0].text;

test("models", async () => {
  const found = [];
  for await (const one of client.models.list()) found.push(one.id);
  assert.deepEqual(found, [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("completion and usage", async () => {
  const answer = await client.completions.create({ ...greedy, prompt: "def add(" });
  assert.equal(answer.choices[0].text, continued);
  assert.equal(answer.usage.completion_tokens, 12);
});

test("chat", async () => {
  const answer = await client.chat.completions.create({ ...greedy, messages: chat });
  assert.equal(answer.choices[0].message.content, said);
});

test("stream with usage", async () => {
  const options = { stream: true, stream_options: { include_usage: true } };
  let text = "";
  let usage = null;
  for await (const chunk of await client.chat.completions.create({ ...greedy, messages: chat, ...options })) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, said);
  assert.equal(usage.completion_tokens, 12);
});

test("stream helper", async () => {
  const stream = client.chat.completions.stream({ ...greedy, messages: chat });
  assert.equal(await stream.finalContent(), said);
});

const refused = (kind, param, words = "") => (error) => {
  assert.ok(error instanceof kind, `${error}`);
  assert.equal(error.param, param);
  assert.ok(error.message.includes(words), error.message);
  assert.ok(error.requestID);
  return true;
};

const generates = {
  chat: [(c, f) => c.chat.completions.create({ messages: chat, ...f }), { temperature: 7 }, "equal to 2; got 7"],
  completions: [(c, f) => c.completions.create({ prompt: "x", ...f }), { stop: Array(17).fill("a") }, "at most 16 items"],
  counted: [(c, f) => c.responses.inputTokens.count({ input: "x", ...f }), { tools: [{}] }, "'function'; got None"],
  responses: [(c, f) => c.responses.create({ input: "x", ...f }), { max_output_tokens: 0 }, "equal to 1; got 0"],
  embeddings: [(c, f) => c.embeddings.create({ input: "x", ...f }), { dimensions: 0 }, "equal to 1; got 0"],
};
for (const [name, [call, bad, words]] of Object.entries(generates)) {
  test(`errors: ${name}`, async () => {
    await assert.rejects(call(stranger, { model }), refused(OpenAI.AuthenticationError, null, "not valid; send it as"));
    await assert.rejects(call(client, { model: "none" }), refused(OpenAI.NotFoundError, "model", `this server has '${model}'`));
    await assert.rejects(call(client, { model, ...bad }), refused(OpenAI.BadRequestError, Object.keys(bad)[0], words));
  });
}

const kept = {
  model: [(c) => c.models.retrieve("org/none"), OpenAI.NotFoundError, "model"],
  response: [(c) => c.responses.retrieve("resp_1"), OpenAI.NotFoundError, "request_id"],
  file: [(c) => c.files.retrieve("file-1"), OpenAI.NotFoundError, "file_id"],
  files: [(c) => c.files.list({ limit: 0 }), OpenAI.BadRequestError, "limit"],
  batch: [(c) => c.batches.retrieve("batch_1"), OpenAI.NotFoundError, "batch_id"],
};
for (const [name, [call, kind, param]] of Object.entries(kept)) {
  test(`errors of what is kept: ${name}`, async () => {
    await assert.rejects(call(stranger), OpenAI.AuthenticationError);
    await assert.rejects(call(client), refused(kind, param));
  });
}

test("raw response", async () => {
  const asked = client.chat.completions.create({ ...greedy, messages: chat });
  const { data, response, request_id } = await asked.withResponse();
  assert.equal(data.choices[0].message.content, said);
  assert.equal(request_id, response.headers.get("x-request-id"));
});

test("timeout leaves nothing", async () => {
  const body = { model, prompt: "x", max_tokens: 900, n: 4, ignore_eos: true };
  await assert.rejects(client.completions.create(body, { timeout: 10 }), OpenAI.APIConnectionTimeoutError);
});

test("Retry-After is obeyed", async () => {
  const slow = client.withOptions({ apiKey: limited });
  const ask = (options) => slow.completions.create({ model, prompt: "x", max_tokens: 1 }, options);
  const all = async () => { for (let n = 0; n < 60; n++) await ask(); };
  await assert.rejects(all(), (error) => {
    assert.ok(error instanceof OpenAI.RateLimitError);
    assert.match(error.message, /30 requests a minute; retry after/);
    assert.ok(Number(error.headers.get("retry-after")) >= 1, "the client's own pause is shorter");
    return true;
  });
  assert.equal((await ask({ maxRetries: 1 })).usage.completion_tokens, 1);
});

test("embeddings", async () => {
  const packed = await client.embeddings.create({ model, input: ["def add(", "x"] }); // base64, by itself
  const plain = await client.embeddings.create({ model, input: ["def add(", "x"], encoding_format: "float" });
  packed.data.forEach(({ embedding }, index) => {
    const numbers = plain.data[index].embedding;
    assert.equal(embedding.length, numbers.length);
    embedding.forEach((number, at) => assert.ok(Math.abs(number - numbers[at]) < 1e-7));
  });
  assert.equal((await client.embeddings.create({ model, input: [[5, 6]], dimensions: 8 })).data[0].embedding.length, 8);
});

test("thinking", async () => {
  const messages = [...chat, { role: "assistant", content: "<think>\nI" }];
  const body = { ...greedy, max_tokens: 8, messages, continue_final_message: true };
  const { message } = (await client.chat.completions.create(body)).choices[0];
  assert.ok(message.reasoning_content && message.content === null);
  let thought = "";
  for await (const chunk of await client.chat.completions.create({ ...body, stream: true })) {
    thought += chunk.choices[0].delta.reasoning_content ?? "";
  }
  assert.equal(thought, message.reasoning_content);
});

test("stop", async () => {
  const stop = continued.slice(3, 5);
  const answer = await client.completions.create({ ...greedy, prompt: "def add(", stop: [stop] });
  assert.equal(answer.choices[0].text, continued.slice(0, continued.indexOf(stop)));
  assert.equal(answer.choices[0].finish_reason, "stop");
});

test("seed and n", async () => {
  const texts = async (seed) => {
    const answer = await client.completions.create({ model, prompt: "def add(", max_tokens: 12, temperature: 1, seed, n: 3 });
    return answer.choices.map((choice) => choice.text);
  };
  assert.deepEqual(await texts(1), await texts(1));
  assert.notDeepEqual(await texts(1), await texts(2));
});

test("logprobs", async () => {
  const answer = await client.chat.completions.create({ ...greedy, messages: chat, logprobs: true, top_logprobs: 2 });
  assert.equal(answer.choices[0].logprobs.content.length, 12);
});

const digit = { type: "integer", minimum: 0, maximum: 9 };
const parameters = { type: "object", properties: { a: digit, b: digit }, required: ["a", "b"], additionalProperties: false };

test("tool", async () => {
  const tools = [{ type: "function", function: { name: "add", parameters } }];
  const body = { model, max_tokens: 600, seed: 3, messages: chat, tools, tool_choice: "required", parallel_tool_calls: false };
  const choice = (await client.chat.completions.create(body)).choices[0];
  const call = choice.message.tool_calls[0].function;
  assert.deepEqual([choice.finish_reason, call.name], ["tool_calls", "add"]);
  assert.deepEqual(Object.keys(JSON.parse(call.arguments)).sort(), ["a", "b"]);
  const streamed = await client.chat.completions.stream(body).finalMessage();
  assert.equal(streamed.tool_calls[0].function.arguments, call.arguments);
});

test("response format", async () => {
  const form = { type: "json_schema", json_schema: { name: "sum", schema: parameters } };
  const body = { model, messages: chat, max_tokens: 600, seed: 3, response_format: form };
  const answer = await client.chat.completions.create(body);
  assert.deepEqual(Object.keys(JSON.parse(answer.choices[0].message.content)).sort(), ["a", "b"]);
});

test("leaving a stream cancels", async () => {
  const stream = await client.completions.create({ model, prompt: "x", max_tokens: 900, stream: true, ignore_eos: true });
  let id = null;
  for await (const chunk of stream) {
    id = chunk.id;
    break;
  }
  assert.deepEqual((await ended(id)).finish_reasons, ["cancelled"]);
});

test("response and its events", async () => {
  const body = { model, input: chat, max_output_tokens: 12, temperature: 0 };
  const whole = await client.responses.create(body);
  assert.equal(whole.output_text, said);
  let text = "";
  for await (const event of await client.responses.create({ ...body, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  assert.equal(text, said);
  assert.equal((await client.responses.retrieve(whole.id)).output_text, said);
  const more = await client.responses.create({ ...body, input: "more", previous_response_id: whole.id });
  const counted = await client.responses.inputTokens.count({ model, input: "more", previous_response_id: whole.id });
  assert.equal(counted.input_tokens, more.usage.input_tokens);
  const items = [];
  for await (const item of client.responses.inputItems.list(more.id, { limit: 1, order: "asc" })) items.push(item);
  assert.deepEqual(items.map((item) => item.content[0].text), [chat[0].content, said, "more"]);
  await client.responses.delete(whole.id);
  await assert.rejects(client.responses.retrieve(whole.id), OpenAI.NotFoundError);
  const tool = { type: "function", name: "add", parameters, strict: true };
  const forced = { model, input: chat, max_output_tokens: 600, tools: [tool], tool_choice: "required", parallel_tool_calls: false };
  const [call] = (await client.responses.create({ ...forced, seed: 3 })).output;
  assert.deepEqual([call.type, call.name], ["function_call", "add"]);
  const late = await client.responses.create({ model, input: chat, background: true, ignore_eos: true, priority: "low" });
  assert.equal((await client.responses.cancel(late.id)).status, "cancelled");
});

test("files and batches", async () => {
  const url = "/v1/completions";
  const body = { ...greedy, prompt: "def add(" };
  const lines = [0, 1, 2].map((n) => JSON.stringify({ custom_id: `${n}`, method: "POST", url, body }) + "\n").join("");
  const file = await client.files.create({ file: await toFile(Buffer.from(lines), "in.jsonl"), purpose: "batch" });
  assert.equal(file.bytes, Buffer.byteLength(lines));
  assert.equal((await client.files.retrieve(file.id)).filename, "in.jsonl");
  assert.equal(await (await client.files.content(file.id)).text(), lines);
  const names = [];
  for await (const one of client.files.list({ purpose: "batch" })) names.push(one.id);
  assert.ok(names.includes(file.id));
  let batch = await client.batches.create({ input_file_id: file.id, endpoint: url, completion_window: "24h" });
  const deadline = Date.now() + 60_000;
  while (!["completed", "failed"].includes(batch.status)) {
    assert.ok(Date.now() < deadline, `${batch.id} has not ended`);
    await new Promise((resolve) => setTimeout(resolve, 100));
    batch = await client.batches.retrieve(batch.id);
  }
  assert.deepEqual([batch.status, batch.request_counts.completed], ["completed", 3]);
  assert.equal(batch.usage.output_tokens, 36);
  const answers = (await (await client.files.content(batch.output_file_id)).text()).trim().split("\n").map((text) => JSON.parse(text));
  assert.deepEqual(answers.map((row) => row.response.body.choices[0].text), [continued, continued, continued]);
  for await (const one of client.batches.list({ limit: 1 })) {
    assert.equal(one.id, batch.id);
    break;
  }
  await assert.rejects(client.batches.cancel(batch.id), OpenAI.ConflictError);
  for (const id of [file.id, batch.output_file_id]) assert.ok((await client.files.delete(id)).deleted);
  await assert.rejects(client.files.retrieve(file.id), OpenAI.NotFoundError);
});
