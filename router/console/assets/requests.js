// The answers in progress: where each is, and why it was placed there.

import { fetchExplanation } from "./connection.js";
import { bytes, integer, seconds } from "./format.js";
import { Facts, Notice, Panel } from "./parts.js";
import { Table } from "./table.js";
import { html, useEffect, useMemo, useState } from "./vendor/preact-htm.js";

const PHASES = ["queue", "prefill", "transfer", "decode"];
const REFRESH_MILLISECONDS = 2000;

export function Requests({ store, open, onOpen }) {
  const { cluster, tables } = store;
  const rows = useMemo(() => [...tables.requests.values(), ...tables.ended.values()], [tables.requests, tables.ended]);
  const columns = useMemo(() => requestColumns(store), [store]);
  const hidden = cluster.num_inflight - tables.requests.size;
  return html`
    <h1>Requests <small>${integer(cluster.num_inflight)} in flight</small></h1>
    <ul class="numbers phases">${PHASES.map((phase) => html`
      <li key=${phase}><b>${integer(cluster.phases[phase])}</b><span class="phase ${phase}">${phase}</span></li>`)}</ul>
    ${hidden > 0 && html`<${Notice} title=${`The ${integer(tables.requests.size)} oldest are shown; ${integer(hidden)} more are in flight.`} />`}
    ${cluster.num_ready.router > 1 && html`<p class="hint">These are the requests of one of ${cluster.num_ready.router} routers.</p>`}
    <${Table} label="Requests" columns=${columns} rows=${rows} onOpen=${(row) => onOpen(row.id)}
              initialSort=${{ name: "age", descending: true }} empty="No request is in flight. The last ones that ended stay here." />
    ${open && html`<${Request} key=${open} id=${open} store=${store} onClose=${() => onOpen("")} />`}`;
}

function requestColumns(store) {
  const rank = (row) => PHASES.indexOf(row.phase);
  return [
    { name: "phase", title: "Phase", sort: rank, cell: (row) => html`<${PhaseBar} row=${row} now=${store.cluster.now} />` },
    { name: "age", title: "Age", numeric: true, sort: (row) => (row.phase === "ended" ? row.ended_at - store.cluster.now : age(row, store)), cell: (row) => seconds(age(row, store)) },
    { name: "tokens", title: "Tokens", numeric: true, wide: true, sort: (row) => row.num_tokens, cell: (row) => integer(row.num_tokens) },
    { name: "workers", title: "Workers", sort: (row) => `${row.prefill} ${row.decode}`, cell: workerPair },
    { name: "reason", title: "Why here", wide: true, cell: (row) => row.reason },
    { name: "tenant", title: "Tenant", wide: true, cell: (row) => row.tenant },
    { name: "request", title: "Request", wide: true, sort: (row) => row.id, cell: (row) => row.id },
  ];
}

function age(row, store) {
  return row.total_seconds ?? Math.max(store.cluster.now - row.arrived_at, 0);
}

function workerPair(row) {
  if (!row.decode) return "not placed";
  return row.prefill && row.prefill !== row.decode ? `${row.prefill} → ${row.decode}` : row.decode;
}

/** The four phases as a bar: those that are over, and the one that the answer is in. */
function PhaseBar({ row, now }) {
  const current = row.phase === "ended" ? PHASES.length : PHASES.indexOf(row.phase);
  const times = phaseTimes(row, row.ended_at ?? now);
  return html`
    <span class="phase-bar" role="img" aria-label=${`phase: ${row.phase}`}>
      ${PHASES.map((phase, index) => html`
        <i key=${phase} title=${`${phase} ${times[phase] ?? ""}`}
           class="${phase} ${index < current ? "over" : index === current ? "now" : "ahead"}"></i>`)}
      <span>${row.phase === "ended" ? `ended: ${row.finish_reason}` : row.phase}</span>
    </span>`;
}

/** How long each phase took, as far as the router knows. */
function phaseTimes(row, now) {
  const total = now - row.arrived_at;
  const queue = row.queue_seconds ?? total;
  const times = { queue: seconds(queue) };
  if (row.queue_seconds !== null) times.prefill = seconds((row.ttft_seconds ?? total) - queue);
  if (row.ttft_seconds !== null) times.decode = seconds(total - row.ttft_seconds);
  return times;
}

function Request({ id, store, onClose }) {
  const seen = store.tables.requests.get(id) ?? store.tables.ended.get(id);
  const [explanation, setExplanation] = useState(undefined);
  const [error, setError] = useState("");
  const isOver = explanation?.finish_reason;
  useEffect(() => {
    let timer = null;
    let isOpen = true;
    const load = async () => {
      try {
        const found = await fetchExplanation(id);
        if (!isOpen) return;
        setExplanation(found);
        setError("");
        if (found && !found.finish_reason) timer = setTimeout(load, REFRESH_MILLISECONDS);
      } catch (failure) {
        if (isOpen) setError(failure.message);
      }
    };
    load();
    return () => {
      isOpen = false;
      clearTimeout(timer);
    };
  }, [id, seen?.phase]);
  const row = seen ?? endedRow(explanation);
  return html`
    <${Panel} title=${`Request ${id}`} onClose=${onClose}>
      ${row && html`<p class="large"><${PhaseBar} row=${row} now=${store.cluster.now} /></p>`}
      ${error && html`<p class="error" role="alert">${error}</p>`}
      ${explanation === null && html`<p>The router does not remember this request; it keeps the latest 4,096.</p>`}
      ${explanation && html`<${Explanation} explanation=${explanation} row=${row} isOver=${isOver} />`}
    </${Panel}>`;
}

/** A row of an answer that ended so long ago that frames do not contain it any more. */
function endedRow(explanation) {
  return explanation?.finish_reason ? { ...explanation, phase: "ended", arrived_at: 0, ended_at: explanation.total_seconds } : undefined;
}

function Explanation({ explanation, row, isOver }) {
  const { predicted, actual, alternatives } = explanation;
  const tiers = Object.entries(explanation.cached_tokens_by_tier ?? {}).filter(([, count]) => count);
  const name = (worker) => worker?.id;
  return html`
    <h3>Why here</h3>
    <p>${explanation.reason || "It has not been placed yet."} ${explanation.policy && html`<small>policy ${explanation.policy}</small>`}</p>
    <${Candidates} title="Prefill workers" rows=${alternatives.prefill} chosen=${name(explanation.prefill)} />
    <${Candidates} title="Decode workers" rows=${alternatives.decode} chosen=${name(explanation.decode)} />
    <${Candidates} title="Mixed workers" rows=${alternatives.mixed} chosen=${name(explanation.decode)} />
    ${explanation.placements.slice(0, -1).map((each) => html`
      <p class="hint" key=${each.epoch}>Before, placement ${each.epoch}: ${name(each.decode)}: ${each.error}</p>`)}
    <h3>How it goes</h3>
    <${Facts} facts=${[
      ["State", isOver ? `ended: ${explanation.finish_reason}` : row?.phase],
      ["Error", explanation.error],
      ["Tenant", row?.tenant],
      ["Prefill worker", name(explanation.prefill)],
      ["Decode worker", name(explanation.decode)],
      ["Time to placement", seconds(explanation.queue_seconds)],
      ["Time to first token", `${seconds(actual.ttft_seconds)} (predicted ${seconds(predicted.ttft_seconds)})`],
      ["Inter-token latency", `${seconds(actual.itl_seconds)} (predicted ${seconds(predicted.itl_seconds)})`],
      ["Total", explanation.total_seconds === null ? "" : seconds(explanation.total_seconds)],
      ["Prompt", `${integer(explanation.prompt_tokens)} tokens, ${integer(explanation.cached_tokens)} cached`],
      ["Cached in", tiers.map(([tier, count]) => `${tier} ${integer(count)}`).join(", ")],
      ["Answer", `${integer(explanation.completion_tokens)} tokens`],
      ["KV transfer", explanation.transport && `${bytes(explanation.kv_transfer_bytes)} by ${explanation.transport}`],
    ]} />`;
}

function Candidates({ title, rows, chosen }) {
  if (!rows?.length) return null;
  return html`
    <div class="scroll"><table class="plain"><caption>${title}, best first; lower scores are better</caption>
      <thead><tr><th>Worker</th><th>Score</th><th>Queue</th><th>Service</th><th>Cached blocks</th><th>Fetched</th><th>Late</th></tr></thead>
      <tbody>${rows.map((row) => html`
        <tr key=${row.worker} class=${row.worker === chosen ? "chosen" : ""}>
          <td>${row.worker === chosen ? "✓ " : ""}${row.worker}</td><td>${row.score === null ? "∞" : row.score.toFixed(3)}</td>
          <td>${seconds(row.queue_seconds)}</td><td>${seconds(row.service_seconds)}</td>
          <td>${integer(row.local_blocks)}</td><td>${integer(row.fetched_blocks)}</td><td>${seconds(row.late_seconds)}</td>
        </tr>`)}</tbody></table></div>`;
}
