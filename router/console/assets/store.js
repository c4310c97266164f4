// The state of the page: what the last frame said, and what can be seen only over time, such as charts and events.

const HISTORY_SECONDS = 15 * 60;
const MAX_EVENTS = 100;

/** The tables of a frame (router/console/state.py), each a Map from a row's id to the row. */
const TABLES = ["pools", "workers", "supervised", "stores", "requests", "ended", "tenants", "rings"];

export class Store {
  constructor() {
    this.cluster = null;
    this.tables = Object.fromEntries(TABLES.map((name) => [name, new Map()]));
    this.history = [];
    this.events = [];
    this.drainPeaks = new Map();
    this.draining = new Set();
    this.departed = new Map();
    this.number = 0;
    this.connection = { state: "connecting" };
    this.listeners = new Set();
  }

  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  notify() {
    for (const listener of this.listeners) listener();
  }

  setConnection(connection) {
    this.connection = connection;
    this.notify();
  }

  /** Applies a frame. Returns false if frames are missing before it, so that only a full frame can follow. */
  apply(frame) {
    if (!frame.is_full && frame.number !== this.number + 1) return false;
    const before = this.cluster;
    const isFirst = before === null;
    const old = { workers: this.tables.workers, pools: this.tables.pools };
    for (const name of TABLES) {
      const change = frame.tables[name];
      const table = frame.is_full ? new Map() : this.tables[name];
      if (!frame.is_full && !change) continue;
      const next = frame.is_full ? table : new Map(table);
      for (const key of change?.removed ?? []) next.delete(key);
      for (const [key, row] of Object.entries(change?.rows ?? {})) next.set(key, row);
      for (const [key, fields] of Object.entries(change?.fields ?? {})) next.set(key, { ...next.get(key), ...fields });
      this.tables[name] = next;
    }
    this.cluster = frame.cluster;
    this.number = frame.number;
    this._trackDrains();
    if (!isFirst) this._recordEvents(before, old);
    this.draining = new Set([...this.draining].filter((id) => this.tables.workers.has(id)));
    this._recordHistory(before);
    this.notify();
    return true;
  }

  /** Records that this page asked for the drain of a worker. */
  addDrain(id) {
    this.draining.add(id);
    this.addEvent(`${id}: drain requested here`);
  }

  /**
   * Remembers which workers drain, and the most requests that each of them had, so that its progress can be shown.
   * A drain may take less time than there is between two frames, so the supervisor's list counts as well.
   */
  _trackDrains() {
    const peaks = new Map();
    for (const row of this.tables.supervised.values()) {
      if (row.state === "draining") this.draining.add(row.id);
    }
    for (const row of this.tables.workers.values()) {
      if (row.state === "draining") {
        this.draining.add(row.id);
        peaks.set(row.id, Math.max(this.drainPeaks.get(row.id) ?? 0, requestsOf(row)));
      }
    }
    this.drainPeaks = peaks;
  }

  _recordEvents(before, old) {
    for (const [id, row] of this.tables.workers) {
      const earlier = old.workers.get(id);
      if (!earlier) this.addEvent(`${row.name} joined as ${row.role} worker (${row.state})`);
      else if (earlier.role !== row.role) this.addEvent(`${row.name} is now a ${row.role} worker`);
      else if (earlier.state !== row.state) this.addEvent(`${row.name}: ${earlier.state} → ${row.state}`);
      if (row.problem && earlier && !earlier.problem) this.addEvent(`${row.name}: ${row.problem}`, "warning");
    }
    const shrunk = new Set();
    for (const [key, row] of this.tables.pools) {
      const earlier = old.pools.get(key);
      if (row.desired !== null && earlier?.desired > row.desired) shrunk.add(key);
      if (earlier && earlier.desired !== row.desired && row.desired !== null && earlier.desired !== null) {
        this.addEvent(`${row.role} pool: ${earlier.desired} → ${row.desired} workers requested`);
      }
    }
    for (const [id, row] of old.workers) {
      if (this.tables.workers.has(id)) continue;
      const hasDrained = this.draining.has(id) || shrunk.has(row.pool);
      this.departed.set(id, hasDrained ? "has drained and left" : "left without draining");
      this.addEvent(`${row.name} ${this.departed.get(id)}`, hasDrained ? "info" : "warning");
    }
    for (const id of [...this.departed.keys()].slice(0, -MAX_EVENTS)) this.departed.delete(id);
    const conductors = (cluster) => cluster.num_ready.conductor;
    if (conductors(before) && !conductors(this.cluster)) this.addEvent("the last conductor is gone", "warning");
    if (!conductors(before) && conductors(this.cluster)) this.addEvent("a conductor is ready");
  }

  addEvent(text, kind = "info") {
    this.events = [{ at: new Date(), text, kind, key: `${Date.now()}-${this.events.length}-${text}` }, ...this.events];
    this.events.length = Math.min(this.events.length, MAX_EVENTS);
  }

  _recordHistory(before) {
    const { cluster } = this;
    const elapsed = before ? cluster.now - before.now : 0;
    const isSameRouter = before && before.router === cluster.router && elapsed > 0;
    const tokens = isSameRouter ? Math.max(cluster.total_tokens - before.total_tokens, 0) / elapsed : null;
    this.history.push({
      at: Date.now() / 1000,
      ttft50: cluster.recent.ttft.p50,
      ttft95: cluster.recent.ttft.p95,
      itl50: cluster.recent.itl.p50,
      itl95: cluster.recent.itl.p95,
      answers: cluster.recent.answers_per_second,
      inflight: cluster.num_inflight,
      tokens,
    });
    const oldest = this.history[this.history.length - 1].at - HISTORY_SECONDS;
    while (this.history[0].at < oldest) this.history.shift();
  }
}

/** The number of requests that a worker has, running and waiting. */
export function requestsOf(worker) {
  return Math.max(worker.running + worker.waiting, worker.decode_requests);
}
