// The console: navigation, the connection's state, and the view that is open.

import { Cache } from "./cache.js";
import { Chat } from "./chat.js";
import { Connection, adminKey } from "./connection.js";
import { integer } from "./format.js";
import { Overview } from "./overview.js";
import { Notice } from "./parts.js";
import { Requests } from "./requests.js";
import { Store } from "./store.js";
import { Tenants } from "./tenants.js";
import { html, render, useEffect, useReducer, useState } from "./vendor/preact-htm.js";
import { Workers } from "./workers.js";

const VIEWS = { chat: Chat, overview: Overview, workers: Workers, requests: Requests, cache: Cache, tenants: Tenants };
const STALE_REGISTRY_SECONDS = 10;

const store = new Store();
const connection = new Connection(store);

/** The view and the id of what is open in it, from an address like #/requests/chatcmpl-1. */
function useRoute() {
  const read = () => {
    const [view, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
    return { view: view in VIEWS ? view : firstView(), open: decodeURIComponent(rest.join("/")) };
  };
  const [route, setRoute] = useState(read);
  useEffect(() => {
    const update = () => setRoute(read());
    addEventListener("hashchange", update);
    return () => removeEventListener("hashchange", update);
  }, []);
  return route;
}

/** The view of an address that names none: operators come with an admin key, everybody else to chat. */
function firstView() {
  return adminKey.get() ? "overview" : "chat";
}

/** Renders again after the store has changed, at most once per animation frame. */
function useStore() {
  const [, tick] = useReducer((count) => count + 1, 0);
  useEffect(() => {
    let request = null;
    const unsubscribe = store.subscribe(() => {
      request ??= requestAnimationFrame(() => {
        request = null;
        tick();
      });
    });
    tick(); // the store may have changed between the first rendering and this
    return unsubscribe;
  }, []);
}

/** Renders again every second while `isOn`, for the time until the next attempt to connect. */
function useCountdown(isOn) {
  const [, tick] = useReducer((count) => count + 1, 0);
  useEffect(() => {
    if (!isOn) return undefined;
    const timer = setInterval(tick, 1000);
    return () => clearInterval(timer);
  }, [isOn]);
}

function App() {
  useStore();
  useCountdown(store.connection.state === "lost");
  const { view, open } = useRoute();
  const View = VIEWS[view];
  const onOpen = (id) => {
    location.hash = id ? `#/${view}/${encodeURIComponent(id)}` : `#/${view}`;
  };
  const isLocked = ["key", "forbidden"].includes(store.connection.state);
  return html`
    <header class="top">
      <a class="brand" href="#/overview">Baton</a>
      <nav aria-label="Views">${Object.keys(VIEWS).map((name) => html`
        <a key=${name} href=${`#/${name}`} aria-current=${name === view ? "page" : undefined}>${name}</a>`)}</nav>
      <${Live} connection=${store.connection} />
    </header>
    <main class=${store.connection.state === "lost" && view !== "chat" ? "stale" : ""}>
      ${view !== "chat" && html`<${Notices} />`}
      ${view === "chat" ? html`<${Chat} store=${store} />`
        : isLocked ? html`<${Locked} connection=${store.connection} />`
        : store.cluster ? html`<${View} store=${store} open=${open} onOpen=${onOpen} />`
        : html`<p class="boot">Connecting to the router…</p>`}
    </main>
    ${store.cluster && html`<footer>Baton ${store.cluster.version}, router ${store.cluster.router}
      ${adminKey.get() && html` · <button class="link" onClick=${forgetKey}>forget the admin key</button>`}</footer>`}`;
}

function forgetKey() {
  adminKey.clear();
  location.reload();
}

function Live({ connection: { state } }) {
  const names = { live: "live", lost: "connection lost", connecting: "connecting", key: "locked", forbidden: "locked" };
  return html`<span class="live ${state}" role="status">${names[state]}</span>`;
}

/** What anybody who looks at the cluster must know first. */
function Notices() {
  const { connection: link, cluster } = store;
  const notices = [];
  const add = (kind, title, text) => notices.push(html`<${Notice} key=${title} kind=${kind} title=${title}>${text}</${Notice}>`);
  if (link.state === "lost") {
    const wait = Math.max(Math.round((link.retryAt - Date.now()) / 1000), 0);
    add("bad lost", "Connection lost.", `${link.message}. The page tries again in ${wait} s; what it shows is old.`);
  }
  if (!cluster || link.state !== "live") return notices;
  if (cluster.is_draining) add("warning", "This router is draining.", "It ends its requests, and then stops.");
  if (cluster.num_ready.conductor === 0) {
    add("warning no-conductor", "No conductor is ready.",
      "Routers place requests by the hash ring: they still run, but load, deadlines and cached prefixes are not considered.");
  } else if (cluster.recent.placed_by_ring > 0) {
    add("warning", "Conductors do not always answer.",
      `Routers placed ${integer(cluster.recent.placed_by_ring)} of the last ${integer(cluster.recent.num_answers)} answers by the hash ring.`);
  }
  if (cluster.registry_age_seconds === null || cluster.registry_age_seconds > STALE_REGISTRY_SECONDS) {
    add("warning", "The registry does not answer.", "Workers are shown as they were when it last did.");
  }
  if (cluster.pools_error) add("warning", "The supervisor does not answer.", `Resizing and draining are not possible: ${cluster.pools_error}`);
  return notices;
}

function Locked({ connection: link }) {
  const [value, setValue] = useState("");
  if (link.state === "forbidden") {
    return html`<section class="card locked"><h1>Not allowed</h1><p class="error">${link.message}</p>
      <p>Open the console on the router's own machine, for example through <code>kubectl port-forward</code> or
      <code>ssh -L</code>, at <code>http://localhost</code>, or set an <code>admin_key</code>. The chat works without it.</p></section>`;
  }
  const submit = (event) => {
    event.preventDefault();
    adminKey.set(value);
    connection.connect();
  };
  return html`
    <section class="card locked"><h1>Admin key</h1>
      <p>The console shows tenants and can drain workers, so it needs the router's <code>admin_key</code>. It stays in this tab.</p>
      ${link.hadKey && html`<p class="error wrong-key" role="alert">The key is wrong.</p>`}
      <form onSubmit=${submit}><label>Admin key <input type="password" autocomplete="off" required value=${value}
        onInput=${(event) => setValue(event.currentTarget.value)} /></label><button class="primary">Open</button></form>
    </section>`;
}

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
connection.connect();
