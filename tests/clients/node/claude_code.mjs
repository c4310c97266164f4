// Claude Code: one `claude -p`, which runs the command that the model calls for, and then answers.
import { spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { model, run, url } from "./cases.mjs";

// Starts the native program; `claude` itself is put in place by an install script, which is not run.
const wrapper = fileURLToPath(new URL("../node_modules/@anthropic-ai/claude-code/cli-wrapper.cjs", import.meta.url));
const options = ["-p", "Say hello with echo.", "--allowedTools", "Bash", "--output-format", "stream-json", "--verbose"];
const variables = {
  ANTHROPIC_BASE_URL: url,
  ANTHROPIC_API_KEY: "none",
  ANTHROPIC_MODEL: model,
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
};

function ask() {
  const folder = mkdtempSync(join(tmpdir(), "claude-code-"));
  try {
    const [home, cwd] = [join(folder, "home"), join(folder, "work")];
    [home, cwd].forEach((each) => mkdirSync(each));
    const env = { ...process.env, ...variables, HOME: home };
    const finished = spawnSync(process.execPath, [wrapper, ...options], { cwd, env, encoding: "utf8", input: "", timeout: 120_000 });
    if (finished.status !== 0) throw new Error(finished.stdout + finished.stderr);
    return summarize(finished.stdout.trim().split("\n").map((line) => JSON.parse(line)));
  } finally {
    rmSync(folder, { recursive: true });
  }
}

function summarize(events) {
  const blocks = events.flatMap((event) => event.message?.content ?? []);
  const outputs = blocks.filter((block) => block.type === "tool_result").map((block) => block.content);
  return [outputs, events.at(-1).result];
}

await run({ "tool loop": ask });
