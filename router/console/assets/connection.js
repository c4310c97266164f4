// Reads frames from /admin/events, and reconnects. EventSource is not used, since it can't send the admin key.

const KEY = "baton-admin-key";
const MAX_FRAME_CHARACTERS = 16 * 1024 * 1024;
const SILENCE_MILLISECONDS = 10_000; // frames come once a second
const FIRST_RETRY_MILLISECONDS = 1000;
const MAX_RETRY_MILLISECONDS = 15_000;
const HIDDEN_MILLISECONDS = 60_000;

export const adminKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  clear: () => sessionStorage.removeItem(KEY),
};

export function adminHeaders() {
  const key = adminKey.get();
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** Returns the message of an error response. */
export async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the router answered with status ${response.status}`;
  }
}

export class Connection {
  constructor(store) {
    this.store = store;
    this.abort = null;
    this.retryTimer = null;
    this.retryMilliseconds = FIRST_RETRY_MILLISECONDS;
    this.isPaused = false;
    this._pauseWhileHidden();
  }

  /** Connects now, ending an earlier connection. */
  connect() {
    clearTimeout(this.retryTimer);
    this.abort?.abort();
    this.abort = new AbortController();
    this._run(this.abort);
  }

  async _run(abort) {
    const isCurrent = () => this.abort === abort;
    let failure = "the connection ended";
    try {
      const options = { headers: adminHeaders(), signal: abort.signal, cache: "no-store" };
      const response = await fetch("/admin/events", options);
      if (!isCurrent()) return;
      if (response.status === 401 || response.status === 403) {
        const state = response.status === 401 ? "key" : "forbidden";
        this.store.setConnection({ state, hadKey: adminKey.get() !== "", message: await errorMessage(response) });
        return;
      }
      if (!response.ok) throw new Error(await errorMessage(response));
      await this._read(response.body, abort);
    } catch (error) {
      if (error.name !== "AbortError" && error.name !== "TypeError") failure = error.message;
      else if (error.name === "TypeError") failure = "the router can't be reached";
    }
    if (isCurrent() && !this.isPaused) this._retryLater(failure);
  }

  async _read(body, abort) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const watchdog = setTimeout(() => abort.abort(), SILENCE_MILLISECONDS);
      const { done, value } = await reader.read().finally(() => clearTimeout(watchdog));
      if (done || this.abort !== abort) return;
      text += value;
      if (text.length > MAX_FRAME_CHARACTERS) throw new Error("a frame is too large");
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const event = text.slice(0, end);
        text = text.slice(end + 2);
        if (event.startsWith("data: ")) this._receive(JSON.parse(event.slice(6)));
      }
    }
  }

  _receive(frame) {
    if (!this.store.apply(frame)) throw new Error("frames are missing");
    this.retryMilliseconds = FIRST_RETRY_MILLISECONDS;
    if (this.store.connection.state !== "live") this.store.setConnection({ state: "live" });
  }

  _retryLater(message) {
    const milliseconds = this.retryMilliseconds * (0.75 + 0.5 * Math.random());
    this.retryMilliseconds = Math.min(2 * this.retryMilliseconds, MAX_RETRY_MILLISECONDS);
    this.store.setConnection({ state: "lost", message, retryAt: Date.now() + milliseconds });
    this.retryTimer = setTimeout(() => this.connect(), milliseconds);
  }

  /** A page that nobody sees for a minute disconnects, so that it costs the router nothing. */
  _pauseWhileHidden() {
    let timer = null;
    document.addEventListener("visibilitychange", () => {
      clearTimeout(timer);
      if (document.hidden) {
        timer = setTimeout(() => {
          this.isPaused = true;
          clearTimeout(this.retryTimer);
          this.abort?.abort();
        }, HIDDEN_MILLISECONDS);
      } else if (this.isPaused) {
        this.isPaused = false;
        this.connect();
      }
    });
  }
}

/** Sends an admin command. Throws an Error with the router's message if it is refused. */
export async function sendCommand(path, body) {
  const headers = { ...adminHeaders(), "content-type": "application/json" };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  if (!response.ok) throw new Error(await errorMessage(response));
  return response.json();
}

/** Returns what happened to a request so far, or null if the router does not remember it. */
export async function fetchExplanation(id) {
  for (const name of new Set([id, id.replace(/-\d+$/, "")])) {
    const url = `/admin/requests/${encodeURIComponent(name)}`;
    const response = await fetch(url, { headers: adminHeaders(), cache: "no-store" });
    if (response.ok) {
      const explanation = await response.json();
      return explanation.choices?.find((each) => each.request_id === id) ?? explanation;
    }
    if (response.status !== 404) throw new Error(await errorMessage(response));
  }
  return null;
}
