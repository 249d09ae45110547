// The official JavaScript client of Anthropic's API. `node suite_anthropic.mjs URL KEY MODEL LIMITED`, inside
// .clients/javascript; LIMITED: a key that may send 30 requests a minute.
import assert from "node:assert/strict";
import test from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";

const [url, key, model, limited] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "Write a function that adds two numbers." }];
const greedy = { model, messages, max_tokens: 12, temperature: 0 };
const digit = { type: "integer", minimum: 0, maximum: 9 };
const tool = {
  name: "add",
  input_schema: { type: "object", properties: { a: digit, b: digit }, required: ["a", "b"], additionalProperties: false },
};

test("message and its stream", async () => {
  const answer = await client.messages.create(greedy);
  assert.equal(answer.stop_reason, "max_tokens");
  assert.equal(answer.usage.output_tokens, 12);
  const stream = client.messages.stream(greedy);
  assert.deepEqual((await stream.finalMessage()).content, answer.content);
  const counted = await client.messages.countTokens({ model, messages });
  assert.equal(counted.input_tokens, answer.usage.input_tokens + answer.usage.cache_read_input_tokens);
});

test("tools", async () => {
  const choice = { type: "tool", name: "add", disable_parallel_tool_use: true };
  const stream = client.messages.stream({ ...greedy, max_tokens: 300, tools: [tool], tool_choice: choice });
  const [call] = (await stream.finalMessage()).content;
  assert.equal(call.name, "add");
  assert.deepEqual(Object.keys(call.input).sort(), ["a", "b"]);
});

test("tool runner goes on without a thread", async () => {
  const add = betaTool({ name: "add", description: "adds", inputSchema: tool.input_schema, run: ({ a, b }) => `${a + b}` });
  const choice = { type: "tool", name: "add", disable_parallel_tool_use: true };
  const body = { model, messages, max_tokens: 400, tools: [add], tool_choice: choice, max_iterations: 1 };
  const names = [];
  for await (const message of client.beta.messages.toolRunner(body)) names.push(...message.content.map((block) => block.name));
  assert.deepEqual(names, ["add"]);
});

test("stop sequence", async () => {
  const { text } = (await client.messages.create(greedy)).content[0];
  const stop = text.slice(text.length / 2, text.length / 2 + 3);
  const answer = await client.messages.create({ ...greedy, stop_sequences: [stop] });
  assert.deepEqual([answer.stop_reason, answer.stop_sequence], ["stop_sequence", stop]);
  assert.equal(answer.content[0].text, text.slice(0, text.indexOf(stop)));
});

test("thinking", async () => {
  const body = { ...greedy, max_tokens: 8, messages: [...messages, { role: "assistant", content: "<think>\nI" }] };
  const [block] = (await client.messages.create(body)).content;
  assert.ok(block.type === "thinking" && block.thinking && block.signature);
  const stream = client.messages.stream(body);
  let thought = "";
  stream.on("thinking", (delta) => { thought += delta; });
  assert.equal((await stream.finalMessage()).content[0].thinking, block.thinking);
  assert.equal(thought, block.thinking);
});

test("structured output", async () => {
  const schema = { type: "object", properties: { sure: { type: "boolean" } }, required: ["sure"], additionalProperties: false };
  const body = { model, messages, max_tokens: 300, output_config: { format: { type: "json_schema", schema } } };
  assert.equal(typeof JSON.parse((await client.messages.create(body)).content[0].text).sure, "boolean");
});

test("models", async () => {
  const found = [];
  for await (const one of client.models.list({ limit: 1 })) found.push(one);
  assert.deepEqual(found.map((one) => [one.id, one.type, one.display_name]), [[model, "model", model]]);
  assert.deepEqual(await client.models.retrieve(model), found[0]);
  await assert.rejects(client.models.retrieve("org/none"), Anthropic.NotFoundError);
});

test("raw response", async () => {
  const { data, response, request_id } = await client.messages.create(greedy).withResponse();
  assert.equal(data.usage.output_tokens, 12);
  assert.equal(request_id, response.headers.get("request-id"));
});

test("timeout leaves nothing", async () => {
  const late = client.messages.create({ ...greedy, max_tokens: 400, ignore_eos: true }, { timeout: 10 });
  await assert.rejects(late, Anthropic.APIConnectionTimeoutError);
});

test("Retry-After is obeyed", async () => {
  const slow = client.withOptions({ apiKey: limited });
  const ask = (options) => slow.messages.create({ ...greedy, max_tokens: 1 }, options);
  const all = async () => { for (let n = 0; n < 60; n++) await ask(); };
  await assert.rejects(all(), (error) => {
    assert.ok(error instanceof Anthropic.RateLimitError);
    assert.match(error.message, /30 requests a minute; retry after/);
    assert.ok(Number(error.headers.get("retry-after")) >= 1, "the client's own pause is shorter");
    return true;
  });
  assert.equal((await ask({ maxRetries: 1 })).usage.output_tokens, 1);
});

const calls = {
  message: [(c, f) => c.messages.create({ ...greedy, ...f }), { max_tokens: 0 }, "equal to 1; got 0"],
  stream: [(c, f) => c.messages.create({ ...greedy, stream: true, ...f }), { stop_sequences: Array(17).fill("a") }, "at most 16 items"],
  counted: [(c, f) => c.messages.countTokens({ model, messages, ...f }), { messages: [] }, "at least 1 item"],
};
for (const [name, [call, bad, words]] of Object.entries(calls)) {
  test(`errors: ${name}`, async () => {
    const refused = (kind, type, ...texts) => (error) => {
      assert.ok(error instanceof kind && error.requestID, `${error}`);
      assert.equal(error.error.error.type, type);
      for (const text of texts) assert.ok(error.message.includes(text), error.message);
      return true;
    };
    const stranger = client.withOptions({ apiKey: "wrong" });
    await assert.rejects(call(stranger, {}), refused(Anthropic.AuthenticationError, "authentication_error", "send it as"));
    const missing = refused(Anthropic.NotFoundError, "not_found_error", `this server has '${model}'`);
    await assert.rejects(call(client, { model: "none" }), missing);
    await assert.rejects(call(client, bad), refused(Anthropic.BadRequestError, "invalid_request_error", Object.keys(bad)[0], words));
  });
}
