// Streams of a model that sleeps, all at once, by OpenAI's and Anthropic's clients; prints what each got.
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";
import { key, model, url } from "./calls.mjs";

const byOpenAI = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const byAnthropic = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "Say hello." }];
const calls = {
  async *chat() {
    for await (const chunk of await byOpenAI.chat.completions.create({ model, messages, stream: true })) {
      yield chunk.choices[0].delta.content;
    }
  },
  async *completion() {
    for await (const chunk of await byOpenAI.completions.create({ model, prompt: "Say hello.", stream: true })) {
      yield chunk.choices[0].text;
    }
  },
  async *responses() {
    for await (const event of await byOpenAI.responses.create({ model, input: "Say hello.", stream: true })) {
      if (event.type === "response.output_text.delta") yield event.delta;
    }
  },
  async *messages() {
    for await (const event of await byAnthropic.messages.create({ model, max_tokens: 6, messages, stream: true })) {
      if (event.type === "content_block_delta") yield event.delta.text;
    }
  },
};

await Promise.all(
  Object.entries(calls).map(async ([call, ask]) => {
    let text = "";
    try {
      for await (const part of ask()) text += part;
      console.log(JSON.stringify({ call, text }));
    } catch (raised) {
      console.log(JSON.stringify({ call, error: String(raised.message) }));
    }
  }),
);
