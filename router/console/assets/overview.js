// The overview: pools with their sizes and load, latencies beside the SLO, and what happened while the page was open.

import { Chart } from "./chart.js";
import { sendCommand } from "./connection.js";
import { clockTime, integer, modelName, percent, seconds, short } from "./format.js";
import { Bar, Notice, useCommand } from "./parts.js";
import { html, useEffect, useState } from "./vendor/preact-htm.js";

export function Overview({ store }) {
  const { cluster, tables } = store;
  const pools = [...tables.pools.entries()].sort(([a], [b]) => (a < b ? 1 : -1));
  return html`
    <h1>Overview</h1>
    ${pools.length === 0 && html`<${EmptyCluster} store=${store} />`}
    <div class="cards">${pools.map(([key, pool]) => html`<${Pool} key=${key} pool=${pool} store=${store} />`)}</div>
    ${cluster.plans.map((plan) => html`<p class="hint" key=${plan.model}>The conductor plans ${plan.prefill} prefill and
      ${" "}${plan.decode} decode workers${cluster.models.length > 1 && html` for ${modelName(plan.model)}`}: ${plan.reason}.</p>`)}
    <${Numbers} cluster=${cluster} history=${store.history} />
    <${Charts} store=${store} />
    <${Events} events=${store.events} />`;
}

function EmptyCluster({ store }) {
  const starting = [...store.tables.supervised.values()];
  return html`
    <${Notice} kind="empty-cluster" title="No workers are registered.">
      ${starting.length > 0
        ? html`The supervisor lists ${starting.length}: ${starting.map((each) => `${each.id} is ${each.state}`).join(", ")}.`
        : html`Start some, for example with <code>baton up</code>; this page shows them as soon as they register.`}
    </${Notice}>`;
}

function Pool({ pool, store }) {
  const { ready, joining, draining } = pool.states;
  const starting = [...store.tables.supervised.values()].filter(
    (each) => each.role === pool.role && (!each.model || each.model === pool.model) && each.state !== "serving" && each.state !== "draining",
  );
  const goal = pool.desired ?? pool.num_workers;
  const isChanging = pool.desired !== null && (ready !== pool.desired || draining > 0);
  return html`
    <section class="card pool" data-pool=${pool.name}>
      <h2>${pool.role} <small>${modelName(pool.model)}</small></h2>
      <p class="size"><b>${ready}</b> ready${pool.desired !== null && html` of <b>${pool.desired}</b> wanted`}
        ${joining > 0 && html`, ${joining} joining`}${draining > 0 && html`, ${draining} draining`}</p>
      ${isChanging && html`
        <${Bar} kind="progress" value=${ready <= goal ? ready : goal} max=${Math.max(ready, goal)}
                label=${ready <= goal ? `${ready} of ${goal} ready` : `${ready - goal} still to leave`} />`}
      ${starting.map((each) => html`<p class="hint" key=${each.id}>${each.id} is ${each.state}${each.message && `: ${each.message}`}</p>`)}
      ${pool.num_workers > 0 && html`
        <${Bar} value=${pool.used_blocks} max=${pool.num_blocks} label=${`KV ${percent(pool.used_blocks, pool.num_blocks)}`} />`}
      <p class="hint">${integer(pool.running)} running, ${integer(pool.waiting)} waiting${
        pool.computes_prompts && `, ${integer(pool.queued_tokens)} tokens queued`}${
        pool.writes_answers && `, ${integer(pool.decode_requests)} decoding`}</p>
      ${store.cluster.can_change_pools && pool.desired !== null && html`<${Resize} pool=${pool} />`}
    </section>`;
}

function Resize({ pool }) {
  const [wanted, setWanted] = useState("");
  const [command, run] = useCommand();
  useEffect(() => setWanted(""), [pool.desired]);
  const size = wanted === "" ? pool.desired : Number(wanted);
  const submit = (event) => {
    event.preventDefault();
    run(() => sendCommand("/admin/scale", { [pool.name]: size }));
  };
  return html`
    <form class="resize" onSubmit=${submit}>
      <label>Workers <input type="number" min=${pool.computes_prompts && pool.writes_answers ? 0 : 1} max="256" value=${size} aria-label=${`Number of ${pool.name} workers`}
        onInput=${(event) => setWanted(event.currentTarget.value)} /></label>
      <button disabled=${command.isRunning || size === pool.desired}>Resize</button>
      ${command.error && html`<p class="error" role="alert">${command.error}</p>`}
    </form>`;
}

function Numbers({ cluster, history }) {
  const { recent } = cluster;
  const judged = Object.values(recent.outcomes).reduce((sum, each) => sum + each, 0);
  const latest = history[history.length - 1];
  const numbers = [
    ["in flight", integer(cluster.num_inflight)],
    ["answers/s", short(recent.answers_per_second)],
    ["tokens/s", short(latest?.tokens)],
    ["within the SLO", percent(recent.outcomes.met, judged)],
    ["failovers", integer(recent.failovers)],
    ["failed", integer(recent.outcomes.failed)],
  ];
  return html`<ul class="numbers" aria-label="The last minute">${numbers.map(([name, value]) => html`
    <li key=${name}><b>${value}</b><span>${name}</span></li>`)}</ul>`;
}

function Charts({ store }) {
  const { ttft_slo_seconds: ttft, itl_slo_seconds: itl } = store.cluster.recent;
  const slo = (value) => ({ label: "SLO", color: "--bad", value: () => value || null, dash: [4, 4] });
  const chart = (title, format, series) => html`
    <${Chart} key=${title} title=${title} history=${store.history} format=${format} series=${series} />`;
  return html`<div class="charts">
    ${chart("Time to first token", seconds, [
      { label: "p50", color: "--series-1", value: (point) => point.ttft50 },
      { label: "p95", color: "--series-2", value: (point) => point.ttft95 },
      slo(ttft),
    ])}
    ${chart("Inter-token latency", seconds, [
      { label: "p50", color: "--series-1", value: (point) => point.itl50 },
      { label: "p95", color: "--series-2", value: (point) => point.itl95 },
      slo(itl),
    ])}
    ${chart("Tokens per second", short, [{ label: "all answers", color: "--series-1", value: (point) => point.tokens }])}
    ${chart("Answers in flight", short, [{ label: "in flight", color: "--series-1", value: (point) => point.inflight }])}
  </div>
  <p class="hint">Latencies are of the answers that ended on this router in the last
    ${" "}${integer(store.cluster.recent.window_seconds)} seconds.</p>`;
}

function Events({ events }) {
  return html`
    <section class="card"><h2>Since this page was opened</h2>
      ${events.length === 0 && html`<p class="empty">No worker has joined, left or changed.</p>`}
      <ol class="events" aria-live="polite">${events.map((event) => html`
        <li key=${event.key} class=${event.kind}><time>${clockTime(event.at)}</time> ${event.text}</li>`)}</ol>
    </section>`;
}
