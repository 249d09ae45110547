// The official JavaScript client of Anthropic's API. `node suite_anthropic.mjs URL KEY MODEL`, inside .clients/javascript.
import assert from "node:assert/strict";
import test from "node:test";
import Anthropic from "@anthropic-ai/sdk";

const [url, key, model] = process.argv.slice(2);
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

test("errors", async () => {
  await assert.rejects(client.messages.create({ ...greedy, model: "none" }), (error) => {
    assert.ok(error instanceof Anthropic.NotFoundError);
    assert.equal(error.error.error.type, "not_found_error");
    return true;
  });
  const stranger = new Anthropic({ baseURL: url, apiKey: "wrong", maxRetries: 0 });
  await assert.rejects(stranger.messages.create(greedy), Anthropic.AuthenticationError);
});
