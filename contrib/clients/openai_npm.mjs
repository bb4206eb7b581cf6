// The npm package `openai` against a gateway: `node contrib/clients/openai_npm.mjs URL MODEL`, where node finds the package.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";

const require = createRequire(join(process.cwd(), "anything.js"));
const { OpenAI } = require("openai");

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "How are the hens?" }];
const schema = { type: "object", properties: { hens: { type: "boolean" } }, required: ["hens"], additionalProperties: false };

const models = [];
for await (const one of client.models.list()) models.push(one.id);
assert(models.includes(model));

const ask = { model, temperature: 0 };
const whole = await client.chat.completions.create({ ...ask, messages, max_tokens: 16 });
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...ask, messages, max_tokens: 16, stream: true })) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, whole.choices[0].message.content);

const tools = [{ type: "function", function: { name: "count", parameters: schema } }];
const forced = await client.chat.completions.create({ ...ask, messages, max_tokens: 100, tools, tool_choice: "required" });
assert.deepEqual(Object.keys(JSON.parse(forced.choices[0].message.tool_calls[0].function.arguments)), ["hens"]);

const response = await client.responses.create({ ...ask, input: messages, max_output_tokens: 16 });
let told = "";
for await (const event of await client.responses.create({ ...ask, input: messages, max_output_tokens: 16, stream: true })) {
    if (event.type === "response.output_text.delta") told += event.delta;
}
assert.equal(told, response.output_text);
await assert.rejects(client.chat.completions.create({ model: "nobody", messages }), { status: 404 });
