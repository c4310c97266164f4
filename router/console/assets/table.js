// A table that renders only the rows in view, so that thousands of rows scroll smoothly.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";

const ROW_PIXELS = 36; // as in style.css
const ROWS_BEYOND_VIEW = 8;

/**
 * `columns`: [{name, title, cell(row), sort(row), wide, numeric}]; columns with `wide` are left out on narrow screens.
 * `rows`: objects with an `id`. `onOpen(row)` is called when a row is clicked, or Enter is pressed on it.
 */
export function Table({ label, columns, rows, onOpen, initialSort, empty }) {
  const [order, setOrder] = useState(initialSort ?? { name: columns[0].name, descending: false });
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(600);
  const frame = useRef(null);
  const sorted = useMemo(() => sortRows(rows, columns, order), [rows, order]);

  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setHeight(entry.contentRect.height));
    observer.observe(frame.current);
    return () => observer.disconnect();
  }, []);

  const first = Math.max(Math.floor(top / ROW_PIXELS) - ROWS_BEYOND_VIEW, 0);
  const last = Math.min(first + Math.ceil(height / ROW_PIXELS) + 2 * ROWS_BEYOND_VIEW, sorted.length);
  const sortBy = (name) => setOrder({ name, descending: order.name === name && !order.descending });

  return html`
    <div class="table-frame" ref=${frame} tabindex="0" role="region" aria-label=${label}
         onScroll=${(event) => setTop(event.currentTarget.scrollTop)}>
      <table aria-rowcount=${sorted.length + 1}>
        <thead><tr>${columns.map((column) => html`
          <th key=${column.name} class=${cellClass(column)} aria-sort=${ariaSort(order, column)}>
            <button onClick=${() => sortBy(column.name)}>${column.title}</button>
          </th>`)}</tr></thead>
        <tbody>
          <tr class="spacer" style=${{ height: `${first * ROW_PIXELS}px` }}></tr>
          ${sorted.slice(first, last).map((row, index) => html`
            <${Row} key=${row.id} row=${row} columns=${columns} onOpen=${onOpen} index=${first + index + 2} />`)}
          <tr class="spacer" style=${{ height: `${(sorted.length - last) * ROW_PIXELS}px` }}></tr>
        </tbody>
      </table>
      ${sorted.length === 0 && html`<p class="empty">${empty}</p>`}
    </div>`;
}

function Row({ row, columns, onOpen, index }) {
  const open = onOpen && (() => onOpen(row));
  const onKey = (event) => event.key === "Enter" && event.target === event.currentTarget && open();
  return html`
    <tr class=${open ? "row clickable" : "row"} data-id=${row.id} aria-rowindex=${index}
        tabindex=${open ? 0 : undefined} onClick=${open} onKeyDown=${open && onKey}>
      ${columns.map((column) => html`<td key=${column.name} class=${cellClass(column)}>${column.cell(row)}</td>`)}
    </tr>`;
}

function cellClass(column) {
  return [column.wide && "wide", column.numeric && "numeric", `column-${column.name}`].filter(Boolean).join(" ");
}

function ariaSort(order, column) {
  if (order.name !== column.name) return undefined;
  return order.descending ? "descending" : "ascending";
}

function sortRows(rows, columns, order) {
  const column = columns.find((each) => each.name === order.name) ?? columns[0];
  const value = column.sort ?? column.cell;
  const keyed = rows.map((row) => [value(row) ?? "", row]);
  const sign = order.descending ? -1 : 1;
  keyed.sort(([a, rowA], [b, rowB]) => sign * compare(a, b) || compare(rowA.id, rowB.id));
  return keyed.map(([, row]) => row);
}

const collator = new Intl.Collator("en", { numeric: true });

function compare(a, b) {
  return typeof a === "number" && typeof b === "number" ? a - b : collator.compare(String(a), String(b));
}
