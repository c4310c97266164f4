"use strict";
// Draws the points of #data. All texts are set as text, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [760, 470, 64, 24, 28, 52];
const KNOWN_KINDS = ["mixed", "split", "hybrid"];
const AXES = [
  { name: "tokens/s per GPU", title: "Output tokens per second per GPU, within the SLO", log: false,
    value: (figures) => figures.tokens_per_second_per_gpu },
  { name: "$ per million tokens", title: "Dollars per million output tokens, within the SLO", log: true,
    value: (figures) => figures.dollars_per_million_tokens },
  { name: "kWh per million tokens", title: "GPU energy in kWh per million output tokens: upper bound", log: true,
    value: (figures) => figures.max_kwh_per_million_tokens },
];
const kinds = [...new Set([...KNOWN_KINDS, ...data.points.map((point) => point.kind)])]
  .filter((kind) => data.points.some((point) => point.kind === kind));
const state = { slo: 0, axis: AXES[0], kinds: new Set(kinds), misses: false, chosen: null };

// -- small helpers --------------------------------------------------------------------------

const get = (id) => document.getElementById(id);
const style = (kind) => (KNOWN_KINDS.includes(kind) ? kind : "other");
const mark = (kind) => ({ mixed: "●", split: "■", hybrid: "▲" })[kind] ?? "◆";
const figures = (point) => point.by_slo[state.slo];
const number = (value, digits = 3) => (value === null ? "–" : Number(value.toPrecision(digits)).toLocaleString("en"));
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const seconds = (values) => ["p50", "p90", "p99"].map((p) => duration(values[p])).join(", ");
const duration = (value) => (value === null ? "–" : value < 1 ? `${number(1000 * value)}\u00a0ms` : `${number(value)}\u00a0s`);

function element(name, attributes = {}, ...children) {
  const svg = ["g", "path", "line", "text"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// -- which points, and which of them are best -----------------------------------------------

function shown() {
  return data.points.filter((point) =>
    state.kinds.has(point.kind) && state.axis.value(figures(point)) !== null && (state.misses || figures(point).meets_target));
}

/** As baton.pareto.on_frontier: no other point is as good in both figures and better in one. */
function frontier(points) {
  const speed = (point) => point.tokens_per_second_per_user;
  const output = (point) => figures(point).tokens_per_second_per_gpu;
  const best = points.filter((point) => figures(point).meets_target);
  return best.filter((point) => !best.some((other) =>
    speed(other) >= speed(point) && output(other) >= output(point) &&
    (speed(other) > speed(point) || output(other) > output(point))))
    .sort((a, b) => speed(a) - speed(b));
}

// -- scales ---------------------------------------------------------------------------------

function ticks(low, high, log) {
  if (log) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const digit of [1, 2, 5]) found.push(Number(`${digit}e${power}`));
    return found.filter((tick) => tick >= low && tick <= high);
  }
  const rough = (high - low) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((digit) => digit * power >= rough);
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => i * step);
}

function scale(values, log, from, to) {
  const low = log ? Math.min(...values) * 0.85 : 0, high = Math.max(...values) * (log ? 1.15 : 1.06);
  const f = log ? Math.log : (value) => value;
  const place = (value) => from + ((f(value) - f(low)) / (f(high) - f(low))) * (to - from);
  return { place, ticks: ticks(low, high, log) };
}

// -- the chart ------------------------------------------------------------------------------

function draw() {
  const chart = get("chart"), points = shown();
  chart.replaceChildren();
  hideTip();
  if (points.length === 0) {
    chart.append(element("text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "No configuration meets this SLO at any simulated rate."));
    return drawTable([]);
  }
  const x = scale(points.map((point) => point.tokens_per_second_per_user), false, LEFT, WIDTH - RIGHT);
  const y = scale(points.map((point) => state.axis.value(figures(point))), state.axis.log, HEIGHT - BOTTOM, TOP);
  const at = (point) => [x.place(point.tokens_per_second_per_user), y.place(state.axis.value(figures(point)))];
  drawAxes(chart, x, y);
  const best = frontier(points);
  for (const kind of kinds) drawLine(chart, kind, frontier(points.filter((point) => point.kind === kind)).map(at));
  const order = [...points].sort((a, b) => a.tokens_per_second_per_user - b.tokens_per_second_per_user);
  const first = points.includes(state.chosen) ? state.chosen : best[0] ?? order[0];
  for (const point of order) drawPoint(chart, point, at(point), best.includes(point), point === first);
  for (const kind of kinds) drawName(chart, kind, frontier(points.filter((point) => point.kind === kind)).map(at));
  drawTable(best);
}

function drawAxes(chart, x, y) {
  for (const tick of y.ticks) {
    chart.append(element("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y.place(tick), y2: y.place(tick) }));
    chart.append(element("text", { class: "tick", x: LEFT - 8, y: y.place(tick) + 4, "text-anchor": "end" }, number(tick, 6)));
  }
  for (const tick of x.ticks) {
    chart.append(element("line", { class: "grid", x1: x.place(tick), x2: x.place(tick), y1: TOP, y2: HEIGHT - BOTTOM }));
    chart.append(element("text", { class: "tick", x: x.place(tick), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, number(tick, 6)));
  }
  chart.append(element("text", { x: LEFT, y: 14 }, state.axis.title));
  chart.append(element("text", { x: WIDTH - RIGHT, y: HEIGHT - 8, "text-anchor": "end" }, "Tokens per second per user (median) →"));
}

function drawLine(chart, kind, places) {
  if (places.length) chart.append(element("path", { class: `frontier ${style(kind)}`, d: `M${places.map((place) => place.join(",")).join("L")}` }));
}

function drawName(chart, kind, places) {
  if (places.length === 0) return;
  const taken = [...chart.querySelectorAll(".name")].map((name) => Number(name.getAttribute("y")));
  let [x, y] = places[0];
  while (taken.some((other) => Math.abs(other - y) < 16)) y += state.axis.log ? -4 : 4; // away from the horizontal axis
  chart.append(element("text", { class: `name ${style(kind)}`, x: x - 10, y: y + 4, "text-anchor": "end" }, kind));
}

function drawPoint(chart, point, [x, y], optimal, isTabStop) {
  const size = optimal ? 6 : 4.5;
  const shapes = {
    mixed: `M${x - size},${y}a${size},${size} 0 1,0 ${2 * size},0a${size},${size} 0 1,0 ${-2 * size},0Z`,
    split: `M${x - size},${y - size}h${2 * size}v${2 * size}h${-2 * size}Z`,
    hybrid: `M${x},${y - size * 1.2}l${size * 1.2},${size * 2}h${-size * 2.4}Z`,
  };
  const classes = ["point", style(point.kind), optimal && "optimal", !figures(point).meets_target && "missed", point === state.chosen && "chosen"];
  const made = element("path", {
    d: shapes[point.kind] ?? `M${x},${y - size * 1.3}l${size * 1.3},${size * 1.3}l${-size * 1.3},${size * 1.3}l${-size * 1.3},${-size * 1.3}Z`,
    class: classes.filter(Boolean).join(" "), role: "button", tabindex: isTabStop ? 0 : -1,
    "aria-pressed": point === state.chosen, "aria-label": summary(point).replaceAll("\n", ", "), "data-index": data.points.indexOf(point),
  });
  made.addEventListener("pointerenter", () => showTip(point, x, y));
  made.addEventListener("pointerleave", hideTip);
  made.addEventListener("focus", () => showTip(point, x, y));
  made.addEventListener("blur", hideTip);
  made.addEventListener("click", () => choose(point));
  chart.append(made);
}

function summary(point) {
  return [`${point.label} at ${number(point.rate_rps)} requests/s`,
    `${number(state.axis.value(figures(point)))} ${state.axis.name}`,
    `${number(point.tokens_per_second_per_user)} tokens/s per user`,
    `${percent(figures(point).attainment)} within the SLO`].join("\n");
}

function showTip(point, x, y) {
  const tip = get("tip");
  tip.textContent = summary(point);
  tip.hidden = false;
  const right = x > WIDTH * 0.6;
  tip.style.left = right ? "auto" : `${(100 * (x + 12)) / WIDTH}%`;
  tip.style.right = right ? `${(100 * (WIDTH - x + 12)) / WIDTH}%` : "auto";
  tip.style.top = `${(100 * y) / HEIGHT}%`;
}

function hideTip() {
  get("tip").hidden = true;
}

/** Arrow keys, Home and End move between the points from slow to fast; Enter and Space choose. */
function onKey(event) {
  const points = [...get("chart").querySelectorAll(".point")], now = points.indexOf(document.activeElement);
  if (now < 0) return;
  const moves = { ArrowRight: now + 1, ArrowUp: now + 1, ArrowLeft: now - 1, ArrowDown: now - 1, Home: 0, End: points.length - 1 };
  if (event.key === "Enter" || event.key === " ") choose(data.points[points[now].dataset.index]);
  else if (event.key in moves) moveFocus(points[now], points[moves[event.key]]);
  else return;
  event.preventDefault();
}

function moveFocus(from, to) {
  if (to === undefined) return;
  from.setAttribute("tabindex", -1);
  to.setAttribute("tabindex", 0);
  to.focus();
}

// -- the chosen point -----------------------------------------------------------------------

function choose(point) {
  state.chosen = point;
  for (const each of get("chart").querySelectorAll(".point")) {
    const chosen = data.points[each.dataset.index] === point;
    each.classList.toggle("chosen", chosen);
    each.setAttribute("aria-pressed", chosen);
  }
  drawDetails();
}

function drawDetails() {
  const point = state.chosen, panel = get("details");
  if (point === null) return panel.replaceChildren(element("h2", {}, "Choose a point"),
    element("p", { class: "note" }, "Click a point, or move with Tab and the arrow keys and press Enter. The outlined points are the frontier: no other shown point gives both more tokens per GPU and more per user."));
  const f = figures(point), deployment = data.deployments[point.label] ?? {};
  const size = (role) => (point.gpus_per_worker[role] > 1 ? ` × ${point.gpus_per_worker[role]} GPUs` : "");
  const workers = Object.entries(point.workers).filter(([, count]) => count).map(([role, count]) => `${count} ${role}${size(role)}`);
  const rows = [
    ["workers", workers.join(", ")], ["GPUs in total", point.num_gpus],
    ["tokens/s per GPU", number(f.tokens_per_second_per_gpu)], ["tokens/s per user (median)", number(point.tokens_per_second_per_user)],
    ["$ per million tokens", number(f.dollars_per_million_tokens)], ["kWh per million tokens ≤", number(f.max_kwh_per_million_tokens)],
    ["tokens per joule ≥", number(f.min_tokens_per_joule)], ["within the SLO", percent(f.attainment)],
    ["rejected", percent(point.rejected_ratio)], ["TTFT p50, p90, p99", seconds(point.ttft_seconds)], ["ITL p50, p90, p99", seconds(point.itl_seconds)],
  ];
  panel.replaceChildren(
    element("h2", {}, element("span", { class: `swatch ${style(point.kind)}` }, mark(point.kind)), ` ${point.label} at ${number(point.rate_rps)} requests/s`),
    element("dl", {}, ...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))])),
    ...copyable("Start it", deployment.up), ...copyable("Helm values", deployment.helm_values),
    ...(deployment.note ? [element("p", { class: "note" }, deployment.note)] : []));
}

function copyable(title, text) {
  if (!text) return [];
  const pre = element("pre", {}, text), button = element("button", { type: "button", "aria-label": `Copy: ${title}` }, "Copy");
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(pre);
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Selected; copy it by keyboard";
    }
  });
  return [element("h3", {}, title), pre, button];
}

// -- the table and the controls -------------------------------------------------------------

function drawTable(points) {
  const heads = ["configuration", "requests/s", "tokens/s per user", "tokens/s per GPU", "$ per million tokens", "kWh per million tokens, at most", "within SLO"];
  const rows = points.map((point) => {
    const f = figures(point), button = element("button", { type: "button" }, element("span", { class: `swatch ${style(point.kind)}` }, mark(point.kind)), ` ${point.label}`);
    button.addEventListener("click", () => choose(point));
    const cells = [number(point.rate_rps), number(point.tokens_per_second_per_user), number(f.tokens_per_second_per_gpu),
      number(f.dollars_per_million_tokens), number(f.max_kwh_per_million_tokens), percent(f.attainment)];
    return element("tr", {}, element("td", {}, button), ...cells.map((cell) => element("td", {}, cell)));
  });
  get("table").replaceChildren(
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))), element("tbody", {}, ...rows));
}

function choice(type, group, text, checked, swatch, onChange) {
  const input = element("input", { type, name: group });
  input.checked = checked;
  input.addEventListener("change", () => { onChange(input.checked); draw(); drawDetails(); });
  return element("label", { class: "choice" }, input, " ", ...(swatch ? [element("span", { class: `swatch ${style(swatch)}` }, mark(swatch)), " "] : []), text);
}

function drawControls() {
  const name = (slo) => `TTFT ≤ ${duration(slo.ttft_seconds)} + prefill, ITL ≤ ${duration(slo.itl_seconds)}`;
  get("slo").append(...data.slos.map((slo, index) => element("option", { value: index }, name(slo))));
  get("slo").addEventListener("change", (event) => { state.slo = Number(event.target.value); draw(); drawDetails(); });
  const known = AXES.filter((axis) => data.points.some((point) => point.by_slo.some((each) => axis.value(each) !== null)));
  get("axes").append(...known.map((axis) => choice("radio", "axis", axis.name, axis === state.axis, null, () => { state.axis = axis; })));
  get("kinds").append(...kinds.map((kind) => choice("checkbox", kind, kind, true, kind, (on) => state.kinds[on ? "add" : "delete"](kind))));
  get("misses").addEventListener("change", (event) => { state.misses = event.target.checked; draw(); });
  get("controls").addEventListener("submit", (event) => event.preventDefault());
  get("chart").addEventListener("keydown", onKey);
}

function drawTexts() {
  const { about, costs } = data;
  get("about").textContent = `${about.traffic}, ${about.num_requests.toLocaleString("en")} requests, seed ${about.seed}; ` +
    `${percent(data.target)} of the requests must meet the SLO. Simulated, with ${about.costs}.`;
  get("caption").textContent = "Each point is a configuration at a rate. Lines are the frontiers of each kind of placement; outlined points are on the frontier of all that is shown.";
  const watts = costs.board_watts === null ? "The power of this GPU is unknown." :
    `Energy assumes that each GPU always draws its board power of ${costs.board_watts} W, so it is an upper bound; hosts and cooling are not included.`;
  get("notes").textContent = `A GPU-hour costs $${costs.dollars_per_gpu_hour}${costs.is_price_assumed ? " (assumed; --price sets it)" : ""}. ${watts} ` +
    "Stricter SLOs judge the same runs, in which requests were placed for the first SLO of the list.";
}

drawTexts();
drawControls();
draw();
drawDetails();
