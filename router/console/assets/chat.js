// A chat with the model, over the same API that clients use. Answers are shown as plain text.

import { errorMessage } from "./connection.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const KEY = "baton-api-key";
const MAX_MESSAGES = 100;

export function Chat({ store }) {
  const [messages, setMessages] = useState([]);
  const [draft, setDraft] = useState("");
  const [error, setError] = useState("");
  const [abort, setAbort] = useState(null);
  const [key, setKey] = useState(sessionStorage.getItem(KEY) ?? "");
  const [needsKey, setNeedsKey] = useState(false);
  const models = store.cluster?.models ?? [];
  const [chosen, setModel] = useState("");
  const model = models.includes(chosen) ? chosen : models[0];
  const end = useRef(null);
  useEffect(() => end.current?.scrollIntoView({ block: "nearest" }), [messages]);

  const saveKey = (value) => {
    setKey(value);
    sessionStorage.setItem(KEY, value);
  };
  const send = async (event) => {
    event?.preventDefault();
    const text = draft.trim();
    if (!text || abort) return;
    const asked = [...messages, { role: "user", content: text }].slice(-MAX_MESSAGES);
    const controller = new AbortController();
    const show = (answer) => setMessages([...asked, answer]);
    setAbort(controller);
    setDraft("");
    setError("");
    show({ role: "assistant", content: "" });
    try {
      await streamAnswer({ model, messages: asked }, key, controller.signal, show);
    } catch (failure) {
      if (failure.status === 401) setNeedsKey(true);
      if (failure.name !== "AbortError") {
        setError(failure.message);
        if (failure.status) {
          setMessages(messages);
          setDraft(text);
        }
      }
    }
    setAbort(null);
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };

  return html`
    <h1>Chat <small>${models.length > 1 ? "" : model ?? ""}</small></h1>
    ${models.length > 1 && html`
      <label class="model-field">Model <select value=${model} onChange=${(event) => setModel(event.currentTarget.value)}>
        ${models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>`}
    ${(needsKey || store.cluster?.needs_api_key) && html`
      <label class="key-field">API key <input type="password" autocomplete="off" value=${key}
        onInput=${(event) => saveKey(event.currentTarget.value)} /></label>`}
    <div class="chat card" aria-live="polite">
      ${messages.length === 0 && html`<p class="empty">Write something. The answer streams from the model; nothing is stored.</p>`}
      ${messages.map((message, index) => html`<${Message} key=${index} message=${message} />`)}
      <div ref=${end}></div>
    </div>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <form class="ask" onSubmit=${send}>
      <textarea rows="2" aria-label="Message" placeholder="What is the capital of Japan?" value=${draft}
        onInput=${(event) => setDraft(event.currentTarget.value)} onKeyDown=${onKey}></textarea>
      ${abort
        ? html`<button type="button" onClick=${() => abort.abort()}>Stop</button>`
        : html`<button class="primary" disabled=${!draft.trim()}>Send</button>`}
      <button type="button" disabled=${abort !== null || messages.length === 0} onClick=${() => setMessages([])}>New chat</button>
    </form>`;
}

function Message({ message }) {
  return html`
    <div class="message ${message.role}">
      <pre>${message.content || "…"}</pre>
      ${message.requestId && html`<a href=${`#/requests/${encodeURIComponent(message.requestId)}`}>where it ran, and why</a>`}
    </div>`;
}

/** Streams an answer. `show` is called with the message so far, whenever text has arrived. */
async function streamAnswer({ model, messages }, key, signal, show) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) },
    body: JSON.stringify({
      model,
      messages: messages.map(({ role, content }) => ({ role, content })),
      stream: true,
    }),
  });
  if (!response.ok) throw Object.assign(new Error(await errorMessage(response)), { status: response.status });
  const requestId = response.headers.get("x-baton-request-id");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let content = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    text += value;
    const lines = text.split("\n");
    text = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices?.[0]?.delta;
      content += delta?.reasoning_content ?? delta?.content ?? "";
    }
    show({ role: "assistant", content, requestId });
  }
  show({ role: "assistant", content, requestId });
}
