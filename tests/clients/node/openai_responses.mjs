// The npm package openai: the Responses API.
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { model, question, run, url } from "./cases.mjs";

const { responses } = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", name: "get_weather", parameters, strict: true }];

async function create() {
  const response = await responses.create({ model, input: question });
  return [response.output_text, response.status];
}

async function stream() {
  let text = "";
  for await (const event of responses.stream({ model, input: question })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  return text;
}

async function toolLoop() {
  const first = await responses.create({ model, input: question, tools });
  const [call] = first.output;
  const input = [{ type: "function_call_output", call_id: call.call_id, output: "21 degrees" }];
  const second = await responses.create({ model, input, tools, previous_response_id: first.id });
  return [call.name, call.arguments, second.output_text];
}

async function parse() {
  const report = z.object({ city: z.string(), degrees: z.number() });
  const text = { format: zodTextFormat(report, "report") };
  return (await responses.parse({ model, input: question, text })).output_parsed;
}

await run({ create, stream, "tool loop": toolLoop, parse });
