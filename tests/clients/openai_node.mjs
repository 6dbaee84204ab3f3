// openai_node.mjs URL: the openai package for Node against the server at URL, which serves glm5-nano without keys: chat
// whole and streamed, the stream helper, n, logprobs, usage, seeds, models, errors, and a stream that is left.
import OpenAI from "openai";
import { VERSION as version } from "openai/version";

const url = process.argv[2]?.replace(/\/$/, "");
if (!url) {
  console.error("usage: openai_node.mjs URL");
  process.exit(2);
}
const model = "glm5-nano";
const VERSE = "If ye know these things, happy are ye if ye do them.";
const messages = [{ role: "user", content: "John 13:17" }];
const odd = [{ role: "user", content: "Tell of a \u{1f642}" }];
const ai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 });
let all = 0;
let failed = 0;

function check(name, good, found = "") {
  all += 1;
  if (!good) failed += 1;
  console.log(`${good ? "ok  " : "FAIL"} ${name}${found === "" ? "" : `: ${typeof found === "string" ? found : JSON.stringify(found)}`}`);
}

async function part(name, what) {
  try {
    await what();
  } catch (e) {
    check(name, false, `${e.constructor.name}: ${e.message}`);
  }
}

const create = (more = {}) => ai.chat.completions.create({ model, messages, ...more });
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

async function owned() {
  const text = await (await fetch(`${url}/metrics`)).text();
  return Number(/^lockstep_pages\{state="owned"\} (\d+)/m.exec(text)[1]);
}

console.log(`openai ${version}, node ${process.version}`);

await part("chat", async () => {
  const whole = await create({ temperature: 0 });
  check("whole", whole.choices[0].message.content === VERSE && whole.choices[0].finish_reason === "stop", whole.choices[0].message.content);
  check("usage", whole.usage.prompt_tokens === 10 && whole.usage.completion_tokens === 17 && whole.usage.total_tokens === 27, whole.usage);
  let text = "";
  let last;
  const frames = [];
  for await (const frame of await create({ temperature: 0, stream: true, stream_options: { include_usage: true } })) {
    frames.push(frame);
    text += frame.choices[0]?.delta?.content ?? "";
    last = frame;
  }
  check("streamed", text === VERSE, text);
  check("include_usage: null, then one frame without choices",
    last.choices.length === 0 && last.usage.total_tokens === 27 && frames.slice(0, -1).every((f) => f.usage === null));
  const stream = ai.chat.completions.stream({ model, messages, temperature: 0, logprobs: true, top_logprobs: 2, stream_options: { include_usage: true } });
  let heard = "";
  stream.on("content", (delta) => { heard += delta; });
  const final = await stream.finalChatCompletion();
  check("the stream helper", final.choices[0].message.content === VERSE && heard === VERSE && final.choices[0].finish_reason === "stop");
  check("its usage and logprobs", (await stream.totalUsage()).total_tokens === 27 && final.choices[0].logprobs.content.map((t) => t.token).join("") === VERSE);
  const two = await create({ messages: odd, n: 2, seed: 5, max_tokens: 12 });
  const texts = two.choices.map((c) => c.message.content);
  check("n=2: other draws", texts.length === 2 && texts[0] !== texts[1], texts);
  const again = ["", ""];
  for await (const f of await create({ messages: odd, n: 2, seed: 5, max_tokens: 12, stream: true }))
    for (const c of f.choices) again[c.index] += c.delta.content ?? "";
  check("n=2 streamed with the same seed: the same", same(again, texts), again);
  const { content } = (await create({ messages: odd, seed: 3, max_tokens: 30, logprobs: true, top_logprobs: 5 })).choices[0].logprobs;
  const fits = content.every((t) => {
    const own = t.top_logprobs.find((x) => same(x.bytes, t.bytes));
    return t.top_logprobs.length === 5 && (own ? own.logprob === t.logprob : t.logprob <= t.top_logprobs[4].logprob);
  });
  check("logprobs: the chosen one is that of the list", content.length > 0 && fits);
  const stopped = (await create({ temperature: 0, stop: ["happy"] })).choices[0];
  check("a stop string", stopped.message.content === "If ye know these things, " && stopped.finish_reason === "stop", stopped.message.content);
  const fresh = new Set();
  for (let i = 0; i < 4; i += 1) fresh.add((await create({ messages: odd, max_tokens: 16 })).choices[0].message.content);
  check("without a seed, draws are fresh", fresh.size > 1, fresh.size);
  const plain = await ai.completions.create({ model, prompt: "In the beginning God", max_tokens: 6, temperature: 0, echo: true, logprobs: 1 });
  check("completions with echo and logprobs", plain.choices[0].text.startsWith("In the beginning God") && plain.choices[0].logprobs.token_logprobs[0] === null);
});

await part("models", async () => {
  const names = [];
  for await (const m of ai.models.list()) names.push(m.id);
  check("models: list and retrieve", same(names, [model]) && (await ai.models.retrieve(model)).id === model, names);
});

for (const [name, kind, what, code, param] of [
  ["an unknown model", OpenAI.NotFoundError, () => create({ model: "gpt-4o" }), "model_not_found", "model"],
  ["over the context", OpenAI.BadRequestError, () => create({ max_tokens: 384 }), "context_length_exceeded", "messages"],
  ["a stream over the context", OpenAI.BadRequestError, () => create({ max_tokens: 384, stream: true }), "context_length_exceeded", "messages"],
  ["temperature 3", OpenAI.BadRequestError, () => create({ temperature: 3 }), "invalid_value", "temperature"],
  ["embeddings", OpenAI.NotFoundError, () => ai.embeddings.create({ model, input: "x" }), "not_found", null],
]) {
  await part(name, async () => {
    const e = await what().then(() => null, (e) => e);
    check(`${name}: ${kind.name}`, e instanceof kind && e.code === code && e.param === param && e.requestID, e && `${e.status} ${e.code} ${e.param}`);
  });
}

await part("left", async () => {
  const stream = await create({ stream: true, max_tokens: 360, ignore_eos: true });
  let n = 0;
  for await (const _ of stream) if ((n += 1) === 5) break; // a loop that is left aborts the request
  const began = Date.now();
  while ((await owned()) > 0 && Date.now() - began < 3000) await new Promise((r) => setTimeout(r, 10));
  check("a stream that is left frees its pages within 1 s", Date.now() - began < 1000, `${Date.now() - began} ms`);
  const abort = new AbortController();
  const waits = ai.chat.completions.create({ model, messages, max_tokens: 360, ignore_eos: true }, { signal: abort.signal }).then(() => null, (e) => e);
  while ((await owned()) === 0) await new Promise((r) => setTimeout(r, 2));
  abort.abort();
  const e = await waits;
  const from = Date.now();
  while ((await owned()) > 0 && Date.now() - from < 3000) await new Promise((r) => setTimeout(r, 10));
  check("a whole reply that is aborted, too", e instanceof OpenAI.APIUserAbortError && Date.now() - from < 1000, `${Date.now() - from} ms`);
});

console.log(`${all - failed} of ${all} checks passed`);
process.exit(failed ? 1 : 0);
