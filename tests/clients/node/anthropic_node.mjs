// Anthropic's own client for TypeScript.
import Anthropic from "@anthropic-ai/sdk";
import { assert, city, key, model, run, url } from "./calls.mjs";

const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];
const short = { model, messages, max_tokens: 6 };
const tools = [{ name: "get_weather", description: "The weather.", input_schema: city }];

await run({
  async create() {
    const message = await client.messages.create(short);
    assert(message.content[0].text);
    assert(message.usage.output_tokens > 0);
  },
  async stream() {
    const stream = client.messages.stream(short);
    let text = "";
    stream.on("text", (part) => (text += part));
    const message = await stream.finalMessage();
    assert.strictEqual(message.content[0].text, text);
  },
  async tools() {
    const message = await client.messages.create({ ...short, max_tokens: 80, tools, tool_choice: { type: "any" } });
    assert.strictEqual(message.stop_reason, "tool_use");
    assert.strictEqual(typeof message.content.at(-1).input, "object");
  },
  async tools_stream() {
    const stream = client.messages.stream({ ...short, max_tokens: 80, tools, tool_choice: { type: "tool", name: "get_weather" } });
    assert.strictEqual((await stream.finalMessage()).content.at(-1).name, "get_weather");
  },
  async count_tokens() {
    assert((await client.messages.countTokens({ model, messages })).input_tokens > 3);
  },
  async unknown_model() {
    await assert.rejects(client.messages.create({ ...short, model: "nobody" }), Anthropic.NotFoundError);
  },
});
