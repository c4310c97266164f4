// The npm package openai: chat completions.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { messages, model, run, url } from "./cases.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const chat = client.chat.completions;
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const description = "Tells the weather of a city.";

async function create() {
  const { choices: [choice] } = await chat.create({ model, messages });
  return [choice.message.content, choice.finish_reason];
}

async function stream() {
  let text = "";
  for await (const chunk of await chat.create({ model, messages, stream: true })) {
    text += chunk.choices[0]?.delta.content ?? "";
  }
  return text;
}

async function toolLoop() {
  const calls = [];
  const getWeather = ({ city }) => (calls.push(city), "21 degrees");
  const weather = { name: "get_weather", description, parameters, function: getWeather, parse: JSON.parse };
  const tools = [{ type: "function", function: weather }];
  return [await chat.runTools({ model, messages, tools }).finalContent(), calls];
}

async function parse() {
  const report = z.object({ city: z.string(), degrees: z.number() });
  const format = zodResponseFormat(report, "report");
  const answer = await chat.parse({ model, messages, response_format: format });
  return answer.choices[0].message.parsed;
}

async function completions() {
  const answer = await client.completions.create({ model, prompt: "Once", max_tokens: 40 });
  return answer.choices[0].text;
}

await run({ create, stream, "tool loop": toolLoop, parse, completions });
