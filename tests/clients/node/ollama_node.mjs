// Ollama's own client for JavaScript.
import { Ollama } from "ollama";
import { assert, city, model, run, url } from "./calls.mjs";

const client = new Ollama({ host: url });
const messages = [{ role: "user", content: "Say hello." }];
const options = { num_predict: 6, temperature: 0 };

await run({
  async list() {
    const found = (await client.list()).models.find((one) => one.name === `${model}:latest`);
    assert.strictEqual(found.digest.length, 64);
  },
  async ps() {
    assert((await client.ps()).models.some((one) => one.name === `${model}:latest`));
  },
  async show() {
    assert((await client.show({ model })).capabilities.includes("completion"));
  },
  async version() {
    assert((await client.version()).version);
  },
  async chat() {
    const answer = await client.chat({ model, messages, options });
    assert(answer.message.content);
    assert(answer.eval_count > 0);
  },
  async chat_stream() {
    let text = "";
    let last = null;
    for await (const part of await client.chat({ model, messages, options, stream: true })) {
      text += part.message.content;
      last = part;
    }
    assert(text);
    assert(last.done);
  },
  async chat_tools() {
    const tools = [{ type: "function", function: { name: "get_weather", description: "The weather.", parameters: city } }];
    const answer = await client.chat({ model, messages, tools, options: { num_predict: 80 } });
    for (const call of answer.message.tool_calls ?? []) assert.strictEqual(typeof call.function.arguments, "object");
  },
  async generate() {
    assert((await client.generate({ model, prompt: "Once upon a time", options })).response);
  },
  async pull_what_is_deployed() {
    assert.strictEqual((await client.pull({ model })).status, "success");
  },
  async errors_are_text() {
    await assert.rejects(client.chat({ model: "nobody", messages }), /nobody/);
    await assert.rejects(client.delete({ model }), /stack file/);
  },
});
