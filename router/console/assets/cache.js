// The KV cache: how much each tier holds, how often it is hit, and the hash ring.

import { bytes, integer, modelName, percent } from "./format.js";
import { Bar } from "./parts.js";
import { Table } from "./table.js";
import { html, useMemo } from "./vendor/preact-htm.js";

const TIER_NAMES = { device: "workers' memory", dram: "store, DRAM", disk: "store, SSD" };
const RING_COLORS = 8; // as in style.css

export function Cache({ store }) {
  const { tables, cluster } = store;
  const stores = useMemo(() => [...tables.stores.values()], [tables.stores]);
  const rings = [...tables.rings.values()];
  return html`
    <h1>Cache</h1>
    <div class="cards">
      <${Tiers} workers=${tables.workers} stores=${stores} />
      <${Hits} hits=${cluster.recent.hits} windowSeconds=${cluster.recent.window_seconds} />
    </div>
    <h2>KV store nodes</h2>
    <${Table} label="KV store nodes" columns=${STORE_COLUMNS} rows=${stores} empty="There are no KV store nodes." />
    <h2>Hash ring of the workers that compute prompts</h2>
    <p class="hint">Routers place requests by this ring while no conductor answers. A segment is a worker's share of all keys.</p>
    ${rings.length === 0 && html`<p class="empty">There are no workers that compute prompts.</p>`}
    ${rings.map((ring) => html`<${Ring} key=${ring.model} ring=${ring} />`)}`;
}

function Tiers({ workers, stores }) {
  let used = 0;
  let size = 0;
  for (const row of workers.values()) {
    used += row.used_blocks * row.block_bytes;
    size += row.num_blocks * row.block_bytes;
  }
  const sum = (name) => stores.reduce((total, row) => total + (row[name] ?? 0), 0);
  const tiers = [
    ["device", used, size],
    ["dram", sum("used_bytes"), sum("arena_bytes")],
    ["disk", sum("disk_used_bytes"), sum("disk_capacity_bytes")],
  ];
  return html`
    <section class="card"><h2>KV by tier</h2>${tiers.map(([tier, part, whole]) => html`
      <p key=${tier} class="tier"><span>${TIER_NAMES[tier]}</span>
        <${Bar} kind=${tier} value=${part} max=${whole} label=${whole ? `${bytes(part)} of ${bytes(whole)}` : "none"} /></p>`)}
    </section>`;
}

function Hits({ hits, windowSeconds }) {
  const cached = hits.device + hits.dram + hits.disk;
  return html`
    <section class="card"><h2>Hit rates <small>the last ${integer(windowSeconds)} s</small></h2>
      <p>${percent(cached, hits.prompt_tokens)} of ${integer(hits.prompt_tokens)} prompt tokens were cached.</p>
      ${Object.entries(TIER_NAMES).map(([tier, name]) => html`
        <p key=${tier} class="tier"><span>${name}</span>
          <${Bar} kind=${tier} value=${hits[tier]} max=${hits.prompt_tokens} label=${percent(hits[tier], hits.prompt_tokens)} /></p>`)}
    </section>`;
}

const STORE_COLUMNS = [
  { name: "node", title: "Node", sort: (row) => row.id, cell: (row) => row.id },
  { name: "dram", title: "DRAM", sort: (row) => row.used_bytes ?? 0, cell: (row) => row.error || html`<${Bar} kind="dram" value=${row.used_bytes} max=${row.arena_bytes} label=${bytes(row.used_bytes)} />` },
  { name: "disk", title: "SSD", sort: (row) => row.disk_used_bytes ?? 0, cell: (row) => html`<${Bar} kind="disk" value=${row.disk_used_bytes} max=${row.disk_capacity_bytes} label=${bytes(row.disk_used_bytes)} />` },
  { name: "blocks", title: "Blocks", numeric: true, wide: true, sort: (row) => row.num_blocks ?? 0, cell: (row) => integer(row.num_blocks) },
  { name: "hits", title: "Block hits", numeric: true, sort: hitShare, cell: (row) => percent(hitBlocks(row), hitBlocks(row) + (row.missed_blocks ?? 0)) },
  { name: "evictions", title: "Evictions", numeric: true, wide: true, sort: (row) => row.evictions ?? 0, cell: (row) => integer(row.evictions) },
  { name: "failures", title: "Damaged", numeric: true, wide: true, sort: (row) => row.checksum_failures ?? 0, cell: (row) => integer(row.checksum_failures) },
  { name: "host", title: "Host", wide: true, cell: (row) => row.host },
];

function hitBlocks(row) {
  return (row.hit_blocks_dram ?? 0) + (row.hit_blocks_disk ?? 0);
}

function hitShare(row) {
  return hitBlocks(row) / Math.max(hitBlocks(row) + (row.missed_blocks ?? 0), 1);
}

function Ring({ ring }) {
  if (!ring.shares) {
    return html`<p class="hint">${modelName(ring.model)}: ${integer(ring.num_workers)} workers, too many to show.</p>`;
  }
  const shares = Object.entries(ring.shares);
  return html`
    <figure class="ring"><figcaption>${modelName(ring.model)}: ${integer(ring.num_workers)} workers</figcaption>
      <div class="strip">${shares.map(([worker, share], index) => html`
        <i key=${worker} class="ring-${index % RING_COLORS}" style=${{ flexGrow: share }} title=${`${worker}: ${percent(share, 1)}`}>
          ${share > 0.07 && html`<span>${worker} ${percent(share, 1)}</span>`}</i>`)}</div>
    </figure>`;
}
