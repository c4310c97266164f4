// The AI SDK: npm packages ai and @ai-sdk/openai. The argument chooses the API: chat or responses.
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { model as name, question as prompt, run, url } from "./cases.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const provider = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const fields = { model: provider[process.argv[2]](name), prompt, maxRetries: 0 };
const schema = z.object({ city: z.string(), degrees: z.number() });
const weather = tool({
  description: "Tells the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => ({ city, degrees: 21 }),
});
const withTools = { ...fields, tools: { get_weather: weather }, stopWhen: stepCountIs(5) };

async function text(extra = {}) {
  const answer = await generateText({ ...fields, ...extra });
  return [answer.text, answer.finishReason];
}

async function stream(options = fields) {
  let failure = null;
  const answer = streamText({ ...options, onError: ({ error }) => (failure = error) });
  let streamed = "";
  for await (const part of answer.textStream) streamed += part;
  if (failure) throw failure;
  return [streamed, (await answer.usage).outputTokens > 0];
}

async function toolLoop() {
  const answer = await generateText(withTools);
  const calls = answer.steps.flatMap((step) => step.toolCalls.map((call) => [call.toolName, call.input]));
  return [calls, answer.text];
}

const stopSequences = ["no", "such", "text", "zero", " scripted"];
await run({
  generateText: text,
  streamText: stream,
  "tool loop": toolLoop,
  "streamed tool loop": () => stream(withTools),
  generateObject: async () => (await generateObject({ ...fields, schema })).object,
  "five stop sequences": () => text({ stopSequences }),
});
