// A chart of values over the last 15 minutes, drawn by uPlot.

import uPlot from "./vendor/uPlot.esm.js";
import { html, useEffect, useRef } from "./vendor/preact-htm.js";

const HEIGHT = 150;

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** `series`: [{label, color: the name of a CSS variable, value(point), dash}]; `format` formats values for people. */
export function Chart({ title, history, series, format }) {
  const holder = useRef(null);
  const plot = useRef(null);

  useEffect(() => {
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const draw = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(holder.current.clientWidth, series, format), data(history, series), holder.current);
    };
    const observer = new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (plot.current && width > 0) plot.current.setSize({ width, height: HEIGHT });
    });
    draw();
    observer.observe(holder.current);
    scheme.addEventListener("change", draw);
    return () => {
      observer.disconnect();
      scheme.removeEventListener("change", draw);
      plot.current?.destroy();
    };
  }, []);

  useEffect(() => {
    plot.current?.setData(data(history, series));
  });

  const latest = history[history.length - 1];
  return html`
    <figure class="card chart">
      <figcaption>${title}
        <span class="legend">${series.map((each) => html`
          <span key=${each.label} class="key"><i style=${{ background: `var(${each.color})` }}></i>
            ${each.label} <b>${latest ? format(each.value(latest)) : "–"}</b></span>`)}</span>
      </figcaption>
      <div ref=${holder} role="img" aria-label=${`${title} over the last 15 minutes`}></div>
    </figure>`;
}

function data(history, series) {
  return [history.map((point) => point.at), ...series.map((each) => history.map((point) => each.value(point)))];
}

function options(width, series, format) {
  const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false } };
  return {
    width: Math.max(width, 100),
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    padding: [8, 24, 0, 0],
    scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1e-6) * 1.15] } },
    axes: [
      { ...axis, size: 26, space: 80, values: (_, ticks, axis_, space, step) => ticks.map((tick) => clock(tick, step)) },
      { ...axis, size: 58, space: 34, values: (_, ticks) => ticks.map(format) },
    ],
    series: [
      {},
      ...series.map((each) => ({
        label: each.label,
        stroke: color(each.color),
        width: 1.5,
        dash: each.dash,
        points: { show: false },
        spanGaps: true,
      })),
    ],
  };
}

function clock(timestamp, stepSeconds) {
  return new Date(timestamp * 1000).toLocaleTimeString("en-GB").slice(0, stepSeconds < 60 ? 8 : 5);
}
