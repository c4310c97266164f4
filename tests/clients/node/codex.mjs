// Codex: one `codex exec`, which runs the command that the model calls for, and then answers.
import { spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { model, run, url } from "./cases.mjs";

const program = fileURLToPath(new URL("../node_modules/.bin/codex", import.meta.url));
const config = `
model = "${model}"
model_provider = "baton"
[model_providers.baton]
name = "Baton"
base_url = "${url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
`;

function exec(extra = "") {
  const folder = mkdtempSync(join(tmpdir(), "codex-"));
  try {
    const [home, cwd] = [join(folder, "home"), join(folder, "work")];
    [home, cwd].forEach((each) => mkdirSync(each));
    writeFileSync(join(home, "config.toml"), extra + config);
    const options = ["exec", "--json", "--skip-git-repo-check", "Say hello with echo."];
    const env = { ...process.env, CODEX_HOME: home };
    const finished = spawnSync(program, options, { cwd, env, encoding: "utf8", input: "", timeout: 120_000 });
    if (finished.status !== 0) throw new Error(finished.stdout + finished.stderr);
    return summarize(finished.stdout.trim().split("\n").map((line) => JSON.parse(line)));
  } finally {
    rmSync(folder, { recursive: true });
  }
}

function summarize(events) {
  const items = events.filter((event) => event.type === "item.completed").map((event) => event.item);
  const commands = items.filter((item) => item.type === "command_execution");
  const answers = items.filter((item) => item.type === "agent_message").map((item) => item.text);
  const outputs = commands.map((item) => [item.exit_code, item.aggregated_output.includes("hello")]);
  return [outputs, answers];
}

await run({
  "tool loop": () => exec(),
  "tool loop with reasoning": () => exec('model_reasoning_effort = "high"\n'),
});
