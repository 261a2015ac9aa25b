// OpenAI's own client for Node.
import OpenAI from "openai";
import { assert, city, key, model, run, url } from "./calls.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];
const short = { model, messages, max_tokens: 6, temperature: 0 };
const tools = [{ type: "function", function: { name: "get_weather", description: "The weather.", parameters: city } }];

await run({
  async models_list() {
    const names = (await client.models.list()).data.map((one) => one.id);
    assert(names.includes(model));
  },
  async chat_create() {
    const answer = await client.chat.completions.create(short);
    assert(answer.choices[0].message.content);
  },
  async chat_stream() {
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...short, stream: true })) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    assert(text);
  },
  async chat_n_above_slots() {
    const answer = await client.chat.completions.create({ ...short, n: 4 });
    assert.deepStrictEqual(answer.choices.map((choice) => choice.index), [0, 1, 2, 3]);
  },
  async chat_run_tools() {
    let asked = null;
    const function_ = { ...tools[0].function, parse: JSON.parse, function: (given) => ((asked = given.city), "Sunny.") };
    const runner = client.chat.completions.runTools(
      { ...short, max_tokens: 80, tools: [{ type: "function", function: function_ }], tool_choice: { type: "function", function: { name: "get_weather" } } },
      { maxChatCompletions: 1 },
    );
    await runner.done();
    assert.strictEqual(typeof asked, "string");
  },
  async responses_create_and_previous() {
    const first = await client.responses.create({ model, input: "My name is Ada.", max_output_tokens: 4 });
    const second = await client.responses.create({ model, input: "Who am I?", max_output_tokens: 4, previous_response_id: first.id });
    assert(second.usage.input_tokens > first.usage.input_tokens);
    assert.strictEqual((await client.responses.retrieve(first.id)).id, first.id);
  },
  async responses_stream() {
    const stream = client.responses.stream({ model, input: "Say hello.", max_output_tokens: 6 });
    const kinds = new Set();
    for await (const event of stream) kinds.add(event.type);
    assert(kinds.has("response.output_text.delta"));
    assert((await stream.finalResponse()).output_text);
  },
  async unknown_model() {
    await assert.rejects(client.chat.completions.create({ ...short, model: "nobody" }), OpenAI.NotFoundError);
  },
});
