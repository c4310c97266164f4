// The workers: a table of all of them, and a panel for one.

import { sendCommand } from "./connection.js";
import { bytes, integer, modelName, percent } from "./format.js";
import { Bar, ConfirmButton, Facts, Notice, Panel, State, useCommand } from "./parts.js";
import { requestsOf } from "./store.js";
import { Table } from "./table.js";
import { html, useMemo, useState } from "./vendor/preact-htm.js";

export function Workers({ store, open, onOpen }) {
  const [filter, setFilter] = useState("");
  const { workers } = store.tables;
  const rows = useMemo(() => [...workers.values()].filter((row) => matches(row, filter)), [workers, filter]);
  const columns = useMemo(() => workerColumns(store), [store]);
  const { cluster } = store;
  const hidden = cluster.num_workers - workers.size;
  return html`
    <h1>Workers <small>${filter ? `${rows.length} of ` : ""}${integer(cluster.num_workers)}</small></h1>
    <input type="search" class="filter" placeholder="Filter: id, role, state, host, model" aria-label="Filter workers"
           value=${filter} onInput=${(event) => setFilter(event.currentTarget.value)} />
    ${hidden > 0 && html`<${Notice} title=${`${integer(hidden)} more workers are not shown.`} />`}
    <${Table} label="Workers" columns=${columns} rows=${rows} onOpen=${(row) => onOpen(row.id)}
              initialSort=${{ name: "name", descending: false }} empty=${filter ? "No worker matches." : "No workers are registered."} />
    ${open && html`<${Worker} id=${open} store=${store} onClose=${() => onOpen("")} />`}`;
}

function matches(row, filter) {
  const text = `${row.id} ${row.role} ${row.state} ${row.host} ${row.model} ${row.problem ? "problem" : ""}`.toLowerCase();
  return filter.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function workerColumns(store) {
  const kv = (row) => (row.num_blocks ? row.used_blocks / row.num_blocks : 0);
  return [
    { name: "name", title: "Worker", cell: (row) => row.name },
    { name: "role", title: "Role", wide: true, cell: (row) => row.role },
    { name: "state", title: "State", sort: (row) => row.state, cell: (row) => html`<${Progress} row=${row} store=${store} />` },
    { name: "running", title: "Running", numeric: true, sort: (row) => row.running, cell: (row) => integer(row.running) },
    { name: "waiting", title: "Waiting", numeric: true, wide: true, sort: (row) => row.waiting, cell: (row) => integer(row.waiting) },
    { name: "kv", title: "KV", sort: kv, cell: (row) => html`<${Bar} value=${row.used_blocks} max=${row.num_blocks} label=${percent(row.used_blocks, row.num_blocks)} />` },
    { name: "host", title: "Host", wide: true, cell: (row) => row.host },
    { name: "model", title: "Model", wide: true, cell: (row) => modelName(row.model) },
  ];
}

/** A worker's state, and, if it drains, how many of its requests are left. */
function Progress({ row, store }) {
  if (row.state !== "draining") {
    return html`<${State} state=${row.state} />${row.problem && html` <span class="state problem" title=${row.problem}>avoided</span>`}`;
  }
  const left = requestsOf(row);
  const peak = Math.max(store.drainPeaks.get(row.id) ?? 0, left, 1);
  return html`<${Bar} kind="progress" value=${peak - left} max=${peak} label=${`draining, ${left} left`} />`;
}

function Worker({ id, store, onClose }) {
  const row = store.tables.workers.get(id);
  const [command, run] = useCommand();
  if (!row) {
    return html`<${Panel} title=${id} onClose=${onClose}><p>This worker ${store.departed.get(id) ?? "is not in"} the cluster.</p></${Panel}>`;
  }
  const supervised = store.tables.supervised.get(id);
  const drain = () => run(async () => {
    await sendCommand("/admin/drain", { worker: id });
    store.addDrain(id);
  });
  return html`
    <${Panel} title=${row.name} onClose=${onClose}>
      <p><${Progress} row=${row} store=${store} /></p>
      ${row.problem && html`<p class="error">${row.problem}</p>`}
      ${store.cluster.can_change_pools
        ? html`<p>${row.state === "ready" && html`<${ConfirmButton} label="Drain" question="Drain and remove it?" onConfirm=${drain} disabled=${command.isRunning} />`}
            ${command.error && html`<span class="error" role="alert">${command.error}</span>`}</p>`
        : html`<p class="hint">This router was not started by <code>baton up</code>, so it can't drain workers: use your
            platform's tools, such as <code>baton scale --on kubernetes</code>.</p>`}
      <${Facts} facts=${[
        ["Role", row.role], ["Model", row.model], ["State", row.state],
        ["Supervisor", supervised && `${supervised.state}${supervised.message ? `: ${supervised.message}` : ""}`],
        ["Host", row.host], ["Address", row.address], ["Device", row.device], ["Computed by", row.engine],
        ["Transports", row.transports.join(", ")],
        ["Running", integer(row.running)], ["Waiting", integer(row.waiting)],
        ["Tokens queued", integer(row.queued_tokens)], ["Decoding", integer(row.decode_requests)],
        ["KV blocks", `${integer(row.used_blocks)} of ${integer(row.num_blocks)}`],
        ["KV memory", `${bytes(row.used_blocks * row.block_bytes)} of ${bytes(row.num_blocks * row.block_bytes)}`],
        ["Id", row.id],
      ]} />
    </${Panel}>`;
}
