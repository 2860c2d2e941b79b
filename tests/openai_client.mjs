// Everything that a program with OpenAI's JavaScript client does, once; prints what it saw as one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = "gpt-4o-mini";
const messages = [{ role: "user", content: "Hello" }];
const seen = {};

seen.models = [];
for await (const found of client.models.list()) seen.models.push(found.id);

const completion = await client.completions.create({ model, prompt: "Hello, I am", seed: 3, max_tokens: 5 });
seen.completion = { id: completion.id, text: completion.choices[0].text, usage: completion.usage };

const chat = await client.chat.completions.create({ model, messages, seed: 3, max_tokens: 5 }).withResponse();
seen.chat = {
  text: chat.data.choices[0].message.content,
  job: chat.response.headers.get("x-carpool-job-id") === chat.data.id,
};

const stream = await client.chat.completions.create({
  model, messages, seed: 3, max_tokens: 5, stream: true, stream_options: { include_usage: true },
});
seen.stream = { text: "", ids: [], roles: [], reasons: [], usage: null };
for await (const chunk of stream) {
  seen.stream.ids.push(chunk.id);
  const choice = chunk.choices[0];
  if (!choice) { seen.stream.usage = chunk.usage; continue; }
  seen.stream.text += choice.delta.content ?? "";
  if (choice.delta.role) seen.stream.roles.push(choice.delta.role);
  if (choice.finish_reason) seen.stream.reasons.push(choice.finish_reason);
}

const response = await client.responses.create({ model, input: "Hello", max_output_tokens: 5, background: true });
seen.response = { types: [], numbers: [] };
for await (const event of await client.responses.retrieve(response.id, { stream: true })) {
  seen.response.types.push(event.type);
  seen.response.numbers.push(event.sequence_number);
}
const kept = await client.responses.retrieve(response.id);
seen.response.status = kept.status;
seen.response.text = kept.output_text;

seen.errors = {};
async function failure(name, call) {
  try { await call(); } catch (error) {
    seen.errors[name] = { kind: error.constructor.name, status: error.status, code: error.code, param: error.param };
  }
}
await failure("field", () => client.completions.create({ model, prompt: "x", suffix: "y" }));
await failure("model", () => client.chat.completions.create({ model: "gpt-9", messages }));
await failure("stream", async () => {
  for await (const _ of await client.completions.create({ model, prompt: "x [[raise]]@3", stream: true }));
});

const again = { headers: { "Idempotency-Key": "javascript" } };
const first = await client.completions.create({ model, prompt: "x" }, again);
const second = await client.completions.create({ model, prompt: "x" }, again);
seen.idempotent = first.id === second.id;

console.log(JSON.stringify(seen));
