// Figures at the top of the page, and charts over time: memory by precision, time to first token, output tokens per second.

import { byId, bytesAndUnit, formatAge, formatBytes, formatCount, formatDuration, formatPercent, h, meter, plural, s, sum } from "./dom.js";
import { RUNNING, colourOf, fewestBitsFirst, swatch } from "./precision.js";
import { tierName } from "./server.js";

// Margins of all charts.
const LEFT = 62;
const RIGHT = 8;
const MEMORY_TOP = 10;
const MEMORY_BOTTOM = 20;
const SPEED_TOP = 8;
const SPEED_BOTTOM = 18;
const BREAK_HEIGHT = 30; // strip above an interrupted axis, with the limit line
const BREAK_FACTOR = 3; // the axis is interrupted where the limit is more than this times the cached bytes
const MIN_WINDOW_MS = 120e3;
const TICK_WIDTH = 78;
const TICK_STEPS_S = [15, 30, 60, 120, 300, 600, 900, 1800];

export function showFigures(usage, props) {
  const { hot, ...others } = usage.tiers;
  const { queried_tokens: queried = 0, hit_tokens: hit = 0 } = usage.counters;
  const { remote } = usage;
  const { state } = props;
  const used = hot.bytes + usage.running_bytes;
  const remoteNote = () => (remote.paused_because ? `paused: ${remote.paused_because}` : `${formatCount(remote.written_tokens)} written for them`);
  const figures = [
    figure("memory", "KV in memory", bytesAndUnit(used), `${usage.under === "key" ? "this key's, " : ""}of ${formatBytes(usage.budget_bytes)}`, used / usage.budget_bytes),
    ...Object.entries(others).map(([name, tier]) => figure(name, `KV on ${tierName(name)}`, bytesAndUnit(tier.bytes), `${formatCount(tier.tokens)} tokens${volumeNote(usage.counters)}`)),
    ...(remote ? [figure("remote", "From other servers", [formatCount(remote.read_tokens), "tokens"], remoteNote())] : []),
    figure("cached", "Cached", [formatCount(hot.tokens), "tokens"], plural(hot.spans, "span")),
    figure("hit-rate", "Hit rate", queried ? formatPercent(hit, queried).split("\u00a0") : ["–", ""], `of ${formatCount(queried)} looked up`, queried ? hit / queried : 0),
    figure("hits", "Cache hits", [formatCount(hit), "tokens"], "not computed again"),
    figure("requests", "Requests", [formatCount(state.running), "running"], `${formatCount(state.waiting)} waiting`),
    figure("speed", "Decode", [state.decode_tokens_s.toFixed(1), "tokens/s"], `prefill ${formatCount(state.prefill_tokens_s)}/s`),
    figure("allocator", "MLX memory", bytesAndUnit(usage.allocator_bytes), "weights included"),
  ];
  byId("figures").replaceChildren(...figures);
}

// The volume may have less free space than the limit of the disk tier.
function volumeNote({ disk_allowed_bytes: allowed = 0, disk_limit_bytes: limit = 0 }) {
  return allowed < limit ? `; the volume has room for ${formatBytes(allowed)}, not for ${formatBytes(limit)}` : "";
}

function figure(id, title, [value, unit], note, share) {
  const box = h("div", { "data-figure": id }, h("dt", {}, title), h("dd", { class: "value" }, value, h("small", {}, unit)), h("dd", { class: "note" }, note));
  if (share !== undefined) box.append(meter("dd", "meter", share));
  return box;
}

// Bytes by precision over time, memory above zero and disk below it, with the memory limit as a line. A table beside it shows
// the values at the cursor.
export class MemoryChart {
  // `onView` is called with {begin, now, cursor} after each drawing.
  constructor(history, onView) {
    this.history = history;
    this.onView = onView;
    this.windowSeconds = 3600;
    this.limit = 0;
    this.cursor = null; // number of samples before the last one; null: no cursor
    this.chart = byId("chart");
    this.svg = s("svg", { tabindex: "0", role: "slider", "aria-label": "KV bytes over time", "aria-valuemax": "0" });
    this.empty = h("p", { class: "empty" }, "Nothing is cached yet. Send a request, or try the chat on this page.");
    this.chart.append(this.svg, this.empty);
    this.addListeners();
  }

  addListeners() {
    new ResizeObserver(() => this.draw()).observe(this.chart);
    byId("window").addEventListener("change", (event) => {
      this.windowSeconds = Number(event.target.value);
      this.cursor = null;
      this.draw();
    });
    this.svg.addEventListener("pointermove", (event) => this.onPointerMove(event));
    this.svg.addEventListener("pointerleave", () => this.moveCursor(null));
    this.svg.addEventListener("keydown", (event) => this.onKeyDown(event));
    this.svg.addEventListener("blur", () => this.moveCursor(null));
  }

  update(usage, model) {
    this.limit = usage.budget_bytes;
    this.draw();
    byId("limit").replaceChildren(
      `The dashed line is the memory limit for KV: ${formatBytes(usage.budget_bytes)}. `,
      h("code", {}, `kvstrata plan ${model}`),
      " shows how many tokens and conversations fit at each precision.",
      usage.under === "key" ? " These charts include all keys." : "",
    );
  }

  draw() {
    const now = this.history.lastSampleMs;
    if (now === undefined) return;
    // The chart begins at the first sample where the window is longer than the history.
    const begin = Math.max(now - this.windowSeconds * 1000, Math.min(this.history.firstSampleMs, now - MIN_WINDOW_MS));
    this.samples = this.history.samplesBetween(begin, now);
    if (!this.samples.length) return;
    const width = this.chart.clientWidth;
    const height = this.chart.clientHeight;
    const above = Math.max(...this.samples.map((sample) => sum(Object.values(sample.memory))));
    const below = Math.max(...this.samples.map((sample) => sum(Object.values(sample.disk))));
    this.empty.hidden = above + below > 0;
    const scale = memoryScale(above, below, this.limit, height - MEMORY_TOP - MEMORY_BOTTOM);
    this.x = (time) => LEFT + ((Math.max(time, begin) - begin) / (now - begin)) * (width - LEFT - RIGHT);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(
      ...memoryGrid(scale, width, height),
      ...timeTicks(begin, now, this.x, height - 4),
      ...this.layers("memory", scale.zero, -scale.pixelsPerByte, "layer"),
      ...this.layers("disk", scale.zero, scale.pixelsPerByte, "layer below"),
      s("line", { class: "zero", x1: LEFT, x2: width - RIGHT, y1: scale.zero, y2: scale.zero }),
      ...limitLine(this.limit, scale, width),
      ...this.cursorLine(height),
    );
    this.describe();
    this.onView({ begin, now, cursor: this.cursor === null ? null : this.sampleAt(this.cursor).time });
  }

  layers(tier, zero, pixelsPerByte, className) {
    const formats = fewestBitsFirst(new Set(this.samples.flatMap((sample) => Object.keys(sample[tier]))));
    const stacked = this.samples.map(() => 0);
    return formats.map((format) => {
      const lower = [...stacked];
      this.samples.forEach((sample, index) => (stacked[index] += sample[tier][format] ?? 0));
      const point = (index, bytes) => `${this.x(this.samples[index].time).toFixed(1)},${(zero + bytes * pixelsPerByte).toFixed(1)}`;
      const forth = stacked.map((bytes, index) => point(index, bytes));
      const back = lower.map((bytes, index) => point(index, bytes)).reverse();
      const path = s("path", { class: className, d: `M${forth.join("L")}L${back.join("L")}Z` });
      path.style.fill = colourOf(format);
      return path;
    });
  }

  cursorLine(height) {
    if (this.cursor === null) return [];
    const x = this.x(this.sampleAt(this.cursor).time);
    return [s("line", { class: "cursor", x1: x, x2: x, y1: MEMORY_TOP, y2: height - MEMORY_BOTTOM })];
  }

  sampleAt(cursor) {
    return this.samples[Math.max(0, this.samples.length - 1 - (cursor ?? 0))];
  }

  onPointerMove(event) {
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    const distances = this.samples.map((sample) => Math.abs(this.x(sample.time) - x));
    this.moveCursor(this.samples.length - 1 - distances.indexOf(Math.min(...distances)));
  }

  onKeyDown(event) {
    const moves = { ArrowLeft: 1, ArrowRight: -1, PageUp: 10, PageDown: -10 };
    if (event.key in moves) this.moveCursor((this.cursor ?? 0) + moves[event.key]);
    else if (event.key === "Home") this.moveCursor(this.samples.length - 1);
    else if (event.key === "End" || event.key === "Escape") this.moveCursor(null);
    else return;
    event.preventDefault();
  }

  moveCursor(cursor) {
    this.cursor = cursor === null ? null : Math.min(Math.max(cursor, 0), (this.samples?.length ?? 1) - 1);
    this.draw();
  }

  // Fills the table, and the text that screen readers read for the chart.
  describe() {
    const sample = this.sampleAt(this.cursor);
    const agoSeconds = Math.round((this.history.lastSampleMs - sample.time) / 1000);
    byId("legend-when").textContent = this.cursor === null || agoSeconds === 0 ? "now" : formatAge(agoSeconds);
    const formats = fewestBitsFirst(new Set([...Object.keys(sample.memory), ...Object.keys(sample.disk)])).reverse();
    const total = sum(Object.values(sample.memory)) + sum(Object.values(sample.disk));
    byId("legend").replaceChildren(...formats.map((format) => legendRow(format, sample, total)));
    const values = formats.map((format) => `${format} ${formatBytes(bytesOf(sample, format))}`);
    this.svg.setAttribute("aria-valuemin", String(1 - this.samples.length));
    this.svg.setAttribute("aria-valuenow", String(-(this.cursor ?? 0)));
    this.svg.setAttribute("aria-valuetext", `${agoSeconds} seconds ago: ${values.join(", ") || "nothing"}`);
  }
}

const bytesOf = (sample, format) => (sample.memory[format] ?? 0) + (sample.disk[format] ?? 0);

function legendRow(format, sample, total) {
  const cell = (bytes) => h("td", { class: "number" }, bytes === undefined ? "–" : formatBytes(bytes));
  const label = format === RUNNING ? "running requests" : format;
  return h(
    "tr",
    { "data-precision": format },
    h("th", { scope: "row" }, swatch(format), label),
    cell(sample.memory[format]),
    cell(sample.disk[format]),
    h("td", { class: "number" }, formatPercent(bytesOf(sample, format), total)),
  );
}

// Memory and disk share the height in proportion to their bytes. Ticks are round numbers of bytes, negative for the disk. The
// limit is part of the scale; where it is far above the cached bytes, it is drawn in a strip above an interrupted axis.
function memoryScale(above, below, limit, pixels) {
  const isBroken = limit > BREAK_FACTOR * Math.max(above, 1) && above + below > 0;
  const strip = isBroken ? BREAK_HEIGHT : 0;
  const highest = isBroken ? above * 1.08 : Math.max(above * 1.08, limit * 1.1);
  const total = Math.max(1, highest + below * 1.12);
  const pixelsPerByte = (pixels - strip) / total;
  const zero = MEMORY_TOP + pixels - below * 1.12 * pixelsPerByte;
  const step = roundUpBytes(total / 5);
  const ticks = [];
  for (let bytes = 0; bytes <= highest; bytes += step) ticks.push(bytes);
  for (let bytes = -step; bytes >= -below * 1.12; bytes -= step) ticks.push(bytes);
  const limitY = isBroken ? MEMORY_TOP + 6 : zero - limit * pixelsPerByte;
  return { zero, pixelsPerByte, ticks, isBroken, limitY };
}

function memoryGrid(scale, width, height) {
  const lines = scale.ticks.flatMap((bytes) => {
    const y = scale.zero - bytes * scale.pixelsPerByte;
    return [
      s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
      s("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, formatBytes(Math.abs(bytes))),
    ];
  });
  if (!scale.ticks.some((bytes) => bytes < 0)) return lines;
  return [...lines, s("text", { x: LEFT + 6, y: scale.zero - 6 }, "memory"), s("text", { x: LEFT + 6, y: height - MEMORY_BOTTOM - 4 }, "disk")];
}

function limitLine(limit, { limitY: y, isBroken }, width) {
  if (!limit) return [];
  const line = s("line", { class: "limit-line", x1: LEFT, x2: width - RIGHT, y1: y, y2: y });
  const label = s("text", { class: "limit", x: width - RIGHT - 4, y: y - 4, "text-anchor": "end" }, `limit ${formatBytes(limit)}`);
  if (!isBroken) return [line, label];
  // The line is not to scale, which the interrupted axis shows.
  const breakY = MEMORY_TOP + BREAK_HEIGHT - 6;
  return [line, label, s("path", { class: "axis-break", d: `M${LEFT - 7},${breakY + 3}l7,-5l0,5l7,-5` })];
}

// Time to first token and output tokens per second, over the same time as the memory chart.
export class SpeedCharts {
  constructor(history) {
    this.history = history;
    this.view = null; // {begin, now, cursor}
    this.ttft = new SpeedPlot("Time to first token", "ttft");
    this.rate = new SpeedPlot("Tokens per second", "rate");
    byId("speeds").append(this.ttft.figure, this.rate.figure);
  }

  show(view) {
    this.view = view;
    const slots = this.history.slots.filter((slot) => slot.at >= view.begin && slot.at - this.history.slotMs <= view.now);
    const chosen = view.cursor === null ? null : slots.find((slot) => slot.at >= view.cursor);
    this.drawTtft(slots.filter((slot) => slot.first_token_p50_s !== null), chosen);
    this.drawRate(slots.filter((slot) => slot.tokens_per_s !== null), chosen);
  }

  drawTtft(slots, chosen) {
    const last = chosen ?? slots.at(-1);
    const value = last?.first_token_p50_s ? `p50 ${formatDuration(last.first_token_p50_s)}, p95 ${formatDuration(last.first_token_p95_s)}` : "–";
    const worst = Math.max(0, ...slots.map((slot) => slot.first_token_p95_s));
    const description = slots.length ? `Time to first token over time: last ${value}; worst ${formatDuration(worst)}` : "Time to first token over time: no request yet";
    this.ttft.draw(this.view, worst, formatDuration, value, description, (x, y) =>
      slots.flatMap((slot) => {
        const middle = x(slot.at - this.history.slotMs / 2);
        return [
          s("line", { class: "spread", x1: middle, x2: middle, y1: y(slot.first_token_p50_s), y2: y(slot.first_token_p95_s) }),
          s("circle", { class: "dot", cx: middle, cy: y(slot.first_token_p50_s), r: 2.2 }),
        ];
      }),
    );
  }

  drawRate(slots, chosen) {
    const last = chosen ?? slots.at(-1);
    const format = (rate) => rate.toFixed(rate < 10 ? 1 : 0);
    const value = last?.tokens_per_s == null ? "–" : format(last.tokens_per_s);
    const highest = Math.max(0, ...slots.map((slot) => slot.tokens_per_s));
    const description = `Tokens per second over time: last ${value}; highest ${format(highest)}`;
    this.rate.draw(this.view, highest, format, value, description, (x, y) => {
      if (!slots.length) return [];
      const steps = slots.flatMap((slot) => [slot.at - this.history.slotMs, slot.at].map((time) => `${x(time).toFixed(1)},${y(slot.tokens_per_s).toFixed(1)}`));
      const [from, to] = [x(slots[0].at - this.history.slotMs), x(slots.at(-1).at)];
      return [s("path", { class: "area", d: `M${from},${y(0)}L${steps.join("L")}L${to},${y(0)}Z` })];
    });
  }
}

class SpeedPlot {
  constructor(title, id) {
    this.value = h("b");
    this.svg = s("svg", { role: "img" });
    this.box = h("div", { class: "chart small", "data-plot": id }, this.svg);
    this.figure = h("figure", {}, h("figcaption", {}, `${title} `, this.value), this.box);
  }

  // `marks(x, y)` returns the elements for the data.
  draw(view, highest, format, value, description, marks) {
    const width = this.box.clientWidth;
    const height = this.box.clientHeight;
    const top = roundUpNumber(highest || 1);
    const x = (time) => LEFT + ((Math.min(Math.max(time, view.begin), view.now) - view.begin) / (view.now - view.begin)) * (width - LEFT - RIGHT);
    const y = (number) => height - SPEED_BOTTOM - (number / top) * (height - SPEED_TOP - SPEED_BOTTOM);
    const line = (number, className) => s("line", { class: className, x1: LEFT, x2: width - RIGHT, y1: y(number), y2: y(number) });
    const label = (number) => s("text", { x: LEFT - 8, y: y(number) + 4, "text-anchor": "end" }, number ? format(number) : "0");
    const cursor = view.cursor === null ? [] : [s("line", { class: "cursor", x1: x(view.cursor), x2: x(view.cursor), y1: SPEED_TOP, y2: height - SPEED_BOTTOM })];
    this.value.textContent = value;
    this.svg.setAttribute("aria-label", description);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(line(top, "grid"), line(top / 2, "grid"), line(0, "zero"), label(top), label(0), ...timeTicks(view.begin, view.now, x, height - 3), ...marks(x, y), ...cursor);
  }
}

// Labels of a time axis from `begin` to `end`, in milliseconds, without overlaps.
function timeTicks(begin, end, x, y) {
  const maxTicks = Math.max(1, Math.floor((x(end) - x(begin)) / TICK_WIDTH));
  const step = 1000 * (TICK_STEPS_S.find((seconds) => (end - begin) / (1000 * seconds) <= maxTicks) ?? 3600);
  const offset = 60000 * new Date(end).getTimezoneOffset();
  const ticks = [];
  for (let time = Math.ceil((begin - offset) / step) * step + offset; time <= end; time += step) {
    const label = new Date(time).toLocaleTimeString("en-GB", step < 60000 ? {} : { hour: "2-digit", minute: "2-digit" });
    const left = x(time);
    if (left - x(begin) < 14 || x(end) - left < 52) continue;
    ticks.push(s("text", { x: left, y, "text-anchor": "middle" }, label));
  }
  return [...ticks, s("text", { x: x(end), y, "text-anchor": "end" }, "now")];
}

// The next 1, 2 or 5 times a power of ten, of bytes in their largest unit.
function roundUpBytes(bytes) {
  const unit = 1024 ** Math.floor(Math.log(Math.max(1, bytes)) / Math.log(1024));
  return unit * ([1, 2, 5, 10, 20, 50, 100, 200, 500].find((step) => step * unit >= bytes) ?? 1024);
}

function roundUpNumber(number) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(1e-6, number)));
  return unit * [1, 2, 5, 10].find((step) => step * unit >= number * 0.999999);
}
