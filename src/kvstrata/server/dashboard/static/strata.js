// The strata: stored bytes by precision over time, memory above the line and disk below it, the memory limit as a line, and
// the same as a table.

import { niceBytes, timeTicks } from "./axes.js";
import { byId, h, passed, percent, s, size, sum } from "./dom.js";
import { RUNNING, colour, deepestFirst } from "./precisions.js";

const LEFT = 62;
const RIGHT = 8;
const TOP = 10;
const BOTTOM = 20;
const BREAK = 30; // above the strata, where the limit is far beyond them
const FAR = 3; // times what is held
const LEAST_MS = 120e3; // that are shown

export class Strata {
  // `onView`: told when another time is shown, or pointed at.
  constructor(history, onView) {
    this.history = history;
    this.onView = onView;
    this.windowSeconds = 3600;
    this.budget = 0;
    this.cursor = null; // index from the end of what is shown; null: now
    this.chart = byId("chart");
    this.svg = s("svg", { tabindex: "0", role: "slider", "aria-label": "Bytes held over time", "aria-valuemax": "0" });
    this.empty = h("p", { class: "empty" }, "Nothing is cached yet. Send a request, or try the chat on this page.");
    this.chart.append(this.svg, this.empty);
    this.listen();
  }

  listen() {
    new ResizeObserver(() => this.draw()).observe(this.chart);
    byId("window").addEventListener("change", (event) => {
      this.windowSeconds = Number(event.target.value);
      this.cursor = null;
      this.draw();
    });
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.moveCursor(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.moveCursor(null));
  }

  update(usage, model) {
    this.budget = usage.budget_bytes;
    this.draw();
    byId("limit").replaceChildren(
      `The dashed line is the memory limit for KV: ${size(usage.budget_bytes)}. `,
      h("code", {}, `kvstrata plan ${model}`),
      " tells how many tokens and conversations fit at each precision.",
      usage.under === "key" ? " These graphs are of all keys." : "",
    );
  }

  draw() {
    const now = this.history.last;
    if (now === undefined) return;
    // What is longer ago than the first that is known would be empty.
    const begin = Math.max(now - this.windowSeconds * 1000, Math.min(this.history.first, now - LEAST_MS));
    this.shown = this.history.since(begin, now);
    if (!this.shown.length) return;
    const width = this.chart.clientWidth;
    const height = this.chart.clientHeight;
    const above = Math.max(...this.shown.map((sample) => sum(Object.values(sample.memory))));
    const below = Math.max(...this.shown.map((sample) => sum(Object.values(sample.disk))));
    this.empty.hidden = above + below > 0;
    const scale = makeScale(above, below, this.budget, height - TOP - BOTTOM);
    this.x = (time) => LEFT + ((Math.max(time, begin) - begin) / (now - begin)) * (width - LEFT - RIGHT);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(
      ...this.grid(scale, width, height),
      ...timeTicks(begin, now, this.x, height - 4),
      ...this.layers("memory", scale.zero, -scale.pixelsPerByte, "layer"),
      ...this.layers("disk", scale.zero, scale.pixelsPerByte, "layer below"),
      s("line", { class: "zero", x1: LEFT, x2: width - RIGHT, y1: scale.zero, y2: scale.zero }),
      ...this.limitLine(scale, width),
      ...this.cursorLine(height),
    );
    this.describe();
    this.onView({ begin, now, cursor: this.cursor === null ? null : this.at(this.cursor).time });
  }

  grid(scale, width, height) {
    const lines = scale.ticks.flatMap((bytes) => {
      const y = scale.zero - bytes * scale.pixelsPerByte;
      return [
        s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
        s("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, size(Math.abs(bytes))),
      ];
    });
    const sides = scale.ticks.some((bytes) => bytes < 0) ? [s("text", { x: LEFT + 6, y: scale.zero - 6 }, "memory"), s("text", { x: LEFT + 6, y: height - BOTTOM - 4 }, "disk")] : [];
    return [...lines, ...sides];
  }

  layers(side, zero, pixelsPerByte, className) {
    const names = deepestFirst(new Set(this.shown.flatMap((sample) => Object.keys(sample[side]))));
    const floor = this.shown.map(() => 0);
    return names.map((name) => {
      const lower = [...floor];
      this.shown.forEach((sample, place) => (floor[place] += sample[side][name] ?? 0));
      const at = (place, bytes) => `${this.x(this.shown[place].time).toFixed(1)},${(zero + bytes * pixelsPerByte).toFixed(1)}`;
      const upper = floor.map((bytes, place) => at(place, bytes));
      const back = lower.map((bytes, place) => at(place, bytes)).reverse();
      const path = s("path", { class: className, d: `M${upper.join("L")}L${back.join("L")}Z` });
      path.style.fill = colour(name);
      return path;
    });
  }

  limitLine(scale, width) {
    if (!this.budget) return [];
    const { limit: y } = scale;
    const line = s("line", { class: "budget", x1: LEFT, x2: width - RIGHT, y1: y, y2: y });
    const label = s("text", { class: "limit", x: width - RIGHT - 4, y: y - 4, "text-anchor": "end" }, `limit ${size(this.budget)}`);
    if (!scale.isBroken) return [line, label];
    // The axis is interrupted: the limit is not to scale.
    const at = TOP + BREAK - 6;
    const crack = s("path", { class: "crack", d: `M${LEFT - 7},${at + 3}l7,-5l0,5l7,-5` });
    return [line, label, crack];
  }

  cursorLine(height) {
    if (this.cursor === null) return [];
    const x = this.x(this.at(this.cursor).time);
    return [s("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: height - BOTTOM })];
  }

  at(cursor) {
    return this.shown[Math.max(0, this.shown.length - 1 - (cursor ?? 0))];
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const x = event.clientX - box.left;
    const distances = this.shown.map((sample) => Math.abs(this.x(sample.time) - x));
    this.moveCursor(this.shown.length - 1 - distances.indexOf(Math.min(...distances)));
  }

  key(event) {
    const moves = { ArrowLeft: 1, ArrowRight: -1, PageUp: 10, PageDown: -10 };
    if (event.key in moves) this.moveCursor((this.cursor ?? 0) + moves[event.key]);
    else if (event.key === "Home") this.moveCursor(this.shown.length - 1);
    else if (event.key === "End" || event.key === "Escape") this.moveCursor(null);
    else return;
    event.preventDefault();
  }

  moveCursor(cursor) {
    this.cursor = cursor === null ? null : Math.min(Math.max(cursor, 0), (this.shown?.length ?? 1) - 1);
    this.draw();
  }

  // The table, and what a screen reader says of the chart.
  describe() {
    const sample = this.at(this.cursor);
    const ago = Math.round((this.history.last - sample.time) / 1000);
    byId("legend-when").textContent = this.cursor === null || ago === 0 ? "now" : passed(ago);
    const names = deepestFirst(new Set([...Object.keys(sample.memory), ...Object.keys(sample.disk)])).reverse();
    const total = sum(Object.values(sample.memory)) + sum(Object.values(sample.disk));
    byId("legend").replaceChildren(...names.map((name) => legendRow(name, sample, total)));
    const spoken = names.map((name) => `${name} ${size((sample.memory[name] ?? 0) + (sample.disk[name] ?? 0))}`);
    this.svg.setAttribute("aria-valuemin", String(1 - this.shown.length));
    this.svg.setAttribute("aria-valuenow", String(-(this.cursor ?? 0)));
    this.svg.setAttribute("aria-valuetext", `${ago} seconds ago: ${spoken.join(", ") || "nothing"}`);
  }
}

function legendRow(name, sample, total) {
  const swatch = h("span", { class: "swatch" });
  swatch.style.background = colour(name);
  const cell = (bytes) => h("td", { class: "number" }, bytes === undefined ? "–" : size(bytes));
  const both = (sample.memory[name] ?? 0) + (sample.disk[name] ?? 0);
  const label = name === RUNNING ? "running requests" : name;
  const row = h("tr", { "data-precision": name }, h("th", { scope: "row" }, swatch, label), cell(sample.memory[name]), cell(sample.disk[name]), h("td", { class: "number" }, percent(both, total)));
  return row;
}

// Zero lies where memory and disk get room by what they hold. Ticks are round numbers of bytes; below zero for disk. The
// limit is part of the scale; where it is far beyond what is held, it gets a strip above an interrupted axis.
function makeScale(above, below, limit, pixels) {
  const isBroken = limit > FAR * Math.max(above, 1) && above + below > 0;
  const strip = isBroken ? BREAK : 0;
  const highest = isBroken ? above * 1.08 : Math.max(above * 1.08, limit * 1.1);
  const total = Math.max(1, highest + below * 1.12);
  const pixelsPerByte = (pixels - strip) / total;
  const zero = TOP + pixels - below * 1.12 * pixelsPerByte;
  const step = niceBytes(total / 5);
  const ticks = [];
  for (let bytes = 0; bytes <= highest; bytes += step) ticks.push(bytes);
  for (let bytes = -step; bytes >= -below * 1.12; bytes -= step) ticks.push(bytes);
  const line = isBroken ? TOP + 6 : zero - limit * pixelsPerByte;
  return { zero, pixelsPerByte, ticks, isBroken, limit: line };
}
