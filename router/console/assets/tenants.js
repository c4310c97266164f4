// The tenants: what each used in the last minute, and its limits.

import { integer, percent, seconds } from "./format.js";
import { Bar, Notice } from "./parts.js";
import { Table } from "./table.js";
import { html, useMemo } from "./vendor/preact-htm.js";

export function Tenants({ store }) {
  const { cluster, tables } = store;
  const rows = useMemo(() => [...tables.tenants].map(([id, row]) => ({ id, ...row })), [tables.tenants]);
  const minutes = cluster.recent.window_seconds / 60;
  const columns = useMemo(() => tenantColumns(minutes), [minutes]);
  const hidden = cluster.num_tenants - rows.length;
  return html`
    <h1>Tenants <small>${integer(cluster.num_tenants)}</small></h1>
    ${hidden > 0 && html`<${Notice} title=${`The ${integer(rows.length)} busiest are shown; ${integer(hidden)} more are known.`} />`}
    <p class="hint">Use is of this router, in the last ${integer(cluster.recent.window_seconds)} seconds; limits are of all routers together.
      ${" "}<code>baton usage</code> has the totals.</p>
    <${Table} label="Tenants" columns=${columns} rows=${rows} initialSort=${{ name: "answers", descending: true }} empty="No tenant has sent a request yet." />`;
}

function tenantColumns(minutes) {
  const rate = (count) => count / Math.max(minutes, 1 / 60);
  const tokens = (row) => row.prompt_tokens + row.completion_tokens;
  return [
    { name: "tenant", title: "Tenant", sort: (row) => row.id, cell: (row) => row.id },
    { name: "inflight", title: "In flight", numeric: true, sort: (row) => row.inflight, cell: (row) => withLimit(row.inflight, row.concurrent_requests) },
    { name: "answers", title: "Answers/min", sort: (row) => rate(row.answers), cell: (row) => withLimit(rate(row.answers), row.requests_per_minute) },
    { name: "tokens", title: "Tokens/min", sort: (row) => rate(tokens(row)), cell: (row) => withLimit(rate(tokens(row)), row.tokens_per_minute) },
    { name: "cached", title: "Cached", numeric: true, wide: true, sort: (row) => row.cached_tokens, cell: (row) => percent(row.cached_tokens, row.prompt_tokens) },
    { name: "ttft", title: "TTFT p95", numeric: true, wide: true, sort: (row) => row.ttft_p95 ?? 0, cell: (row) => seconds(row.ttft_p95) },
    { name: "slo", title: "In SLO", numeric: true, wide: true, sort: (row) => row.met, cell: (row) => percent(row.met, row.met + row.missed) },
    { name: "refused", title: "Refused", numeric: true, sort: (row) => row.refused, cell: (row) => integer(row.refused) },
    { name: "priority", title: "Priority", wide: true, cell: (row) => `${row.priority}, weight ${row.weight}` },
  ];
}

function withLimit(value, limit) {
  return limit ? html`<${Bar} value=${value} max=${limit} label=${`${integer(value)} of ${integer(limit)}`} />` : integer(value);
}
