// Small pieces that several views use.

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const CONFIRM_MILLISECONDS = 5000;

export function Bar({ value, max, label, kind = "" }) {
  const share = max > 0 ? Math.min(Math.max(value / max, 0), 1) : 0;
  return html`
    <span class="bar ${kind}" role="meter" aria-valuemin="0" aria-valuemax="1" aria-valuenow=${share.toFixed(3)} aria-label=${label}>
      <i style=${{ width: `${100 * share}%` }}></i><span>${label}</span>
    </span>`;
}

export function State({ state }) {
  return html`<span class="state ${state}">${state}</span>`;
}

export function Notice({ kind = "info", title, children }) {
  return html`<div class="notice ${kind}" role="status"><strong>${title}</strong> ${children}</div>`;
}

/** A button that does something only when it is pressed a second time. */
export function ConfirmButton({ label, question, onConfirm, disabled }) {
  const [asks, setAsks] = useState(false);
  useEffect(() => {
    if (!asks) return undefined;
    const timer = setTimeout(() => setAsks(false), CONFIRM_MILLISECONDS);
    return () => clearTimeout(timer);
  }, [asks]);
  const press = (event) => {
    event.stopPropagation();
    if (asks) onConfirm();
    setAsks(!asks);
  };
  return html`<button class=${asks ? "danger" : ""} disabled=${disabled} onClick=${press}>${asks ? question : label}</button>`;
}

/** A panel over the page, closed by its button, by Escape, or by a click beside it. */
export function Panel({ title, onClose, children }) {
  const dialog = useRef(null);
  useEffect(() => {
    dialog.current.showModal();
  }, []);
  const onClick = (event) => event.target === dialog.current && onClose();
  return html`
    <dialog class="panel" ref=${dialog} onClose=${onClose} onClick=${onClick} aria-label=${title}>
      <header><h2>${title}</h2><button onClick=${onClose} aria-label="Close">✕</button></header>
      <div class="panel-body">${children}</div>
    </dialog>`;
}

/** A list of facts: [[name, value], …]. */
export function Facts({ facts }) {
  return html`<dl class="facts">${facts
    .filter(([, value]) => value !== "" && value !== null && value !== undefined)
    .map(([name, value]) => html`<dt key=${`${name}-name`}>${name}</dt><dd key=${name}>${value}</dd>`)}</dl>`;
}

/** Runs commands one after the other, and keeps the message of the last failure. */
export function useCommand() {
  const [state, setState] = useState({ isRunning: false, error: "" });
  const run = async (command) => {
    setState({ isRunning: true, error: "" });
    try {
      await command();
      setState({ isRunning: false, error: "" });
    } catch (error) {
      setState({ isRunning: false, error: error.message });
    }
  };
  return [state, run];
}
