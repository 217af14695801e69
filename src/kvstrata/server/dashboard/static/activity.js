// Activity of the last hour: samples of memory and speed, recent requests, and cache events.

import { byId, formatClock, formatCount, formatDuration, formatPercent, h, meter, sum } from "./dom.js";
import { OTHER, RUNNING } from "./precision.js";
import { get, inTier, post } from "./server.js";

const HISTORY_MS = 3600e3;
const MAX_POINTS = 600; // of a chart
const MAX_REQUESTS = 500; // as on the server
const MAX_EVENTS = 200;
const POLL_MS = 2000;
const PAGE_ROWS = 12;
const APIS = [
  ["/v1/chat/completions", "chat"],
  ["/v1/completions", "completions"],
  ["/v1/messages", "messages"],
  ["/v1/responses", "responses"],
];

// The server's history is in slots of some seconds and covers all keys. This page adds a sample each second, except where a
// key sees only its own usage.
export class History {
  constructor() {
    this.slots = []; // of the server, oldest first; `at`: end of the slot in this machine's time
    this.samples = []; // of this page: {time, memory: {format: bytes}, disk: {format: bytes}}, oldest first
    this.requests = []; // newest first
    this.events = []; // newest first
    this.serverTime = null; // of the last answer
    this.slotMs = 10000;
  }

  // Merge an answer of GET /cache/history. Returns whether it had new requests or events.
  merge(answer) {
    const offset = Date.now() - 1000 * answer.now;
    this.serverTime = answer.now;
    this.slotMs = 1000 * answer.slot_s;
    const slots = new Map([...this.slots, ...answer.slots].map((slot) => [slot.time, slot]));
    const oldest = answer.now - HISTORY_MS / 1000;
    this.slots = [...slots.values()].filter((slot) => slot.time > oldest).sort((a, b) => a.time - b.time);
    for (const slot of answer.slots) slot.at = 1000 * slot.time + offset + this.slotMs;
    const known = new Set(this.requests.map(requestKey));
    const requests = answer.requests.filter((request) => !known.has(requestKey(request)));
    this.requests = [...requests.reverse(), ...this.requests].slice(0, MAX_REQUESTS);
    this.events = [...answer.events].reverse().concat(this.events).filter((event) => event.time > oldest);
    return requests.length > 0 || answer.events.length > 0;
  }

  addSample(usage, time) {
    // Usage of one key is no continuation of slots that cover all keys.
    if (usage.under !== "all") return;
    this.samples.push(sampleOf(usage, time));
    while (this.samples[0].time < time - HISTORY_MS) this.samples.shift();
  }

  // Slots and samples in order of time, at most about MAX_POINTS.
  samplesBetween(begin, end) {
    const first = this.samples[0]?.time ?? Infinity;
    const older = this.slots.filter((slot) => slot.tiers && slot.at < first).map((slot) => sampleOf(slot, slot.at));
    const stride = (end - begin) / MAX_POINTS;
    const thinned = this.samples.filter((sample, index, all) => index === all.length - 1 || Math.floor(sample.time / stride) !== Math.floor(all[index + 1].time / stride));
    const samples = [...older, ...thinned];
    // The last one before `begin` is included, so that the chart reaches its left edge.
    const index = samples.findIndex((sample) => sample.time >= begin);
    return index < 0 ? samples.slice(-1) : samples.slice(Math.max(0, index - 1));
  }

  get lastSampleMs() {
    return this.samples.at(-1)?.time ?? this.slots.findLast((slot) => slot.tiers)?.at;
  }

  get firstSampleMs() {
    return this.slots.find((slot) => slot.tiers)?.at ?? this.samples[0]?.time;
  }
}

const requestKey = (request) => `${request.time} ${request.id}`;

// `usage`: an answer of /cache/usage, or a slot of the history.
function sampleOf(usage, time) {
  const memory = bytesByFormat(usage.tiers.hot);
  if (usage.running_bytes) memory[RUNNING] = usage.running_bytes;
  return { time, memory, disk: usage.tiers.disk ? bytesByFormat(usage.tiers.disk) : {} };
}

// A tier also has bytes that belong to no format: its catalogue and folders.
function bytesByFormat(tier) {
  const rest = tier.bytes - sum(Object.values(tier.by_precision));
  return rest > 0 ? { ...tier.by_precision, [OTHER]: rest } : { ...tier.by_precision };
}

// Cache events as the server describes them, and events of this page.
export class EventList {
  constructor(history) {
    this.history = history;
    this.pageEvents = []; // newest first
    this.list = byId("events");
    this.show();
  }

  addPageEvent(kind, text) {
    this.pageEvents.unshift({ time: Date.now() / 1000, kind, text });
    this.pageEvents.length = Math.min(this.pageEvents.length, MAX_EVENTS);
    this.show();
  }

  show() {
    const events = [...this.history.events, ...this.pageEvents].sort((a, b) => b.time - a.time).slice(0, MAX_EVENTS);
    const rows = events.map(eventRow);
    this.list.replaceChildren(...(rows.length ? rows : [h("li", { class: "empty" }, "No events yet.")]));
  }
}

function eventRow({ time, kind, text, replica }) {
  const clock = h("time", { datetime: new Date(1000 * time).toISOString() }, formatClock(time));
  const suffix = replica ? ` (${replica})` : "";
  return h("li", {}, clock, h("span", { class: `kind ${kind.replace(" ", "-")}` }, kind), h("span", { class: "what" }, text + suffix));
}

// Finished requests do not change. Their rows are made once, so an update does not disturb a user who reads one.
export class RequestTable {
  constructor(history, onUpdate) {
    this.history = history;
    this.onUpdate = onUpdate;
    this.maxRows = PAGE_ROWS;
    this.rows = new Map(); // request -> its table rows
    this.body = byId("requests");
    this.more = byId("requests-more");
    this.polledAt = -Infinity;
    this.more.addEventListener("click", () => {
      this.maxRows += 2 * PAGE_ROWS;
      this.show();
    });
    this.show();
  }

  // Called by main.js once a second; polls at its own interval.
  async update() {
    if (performance.now() - this.polledAt < POLL_MS) return;
    this.polledAt = performance.now();
    const since = this.history.serverTime === null ? "" : `?since=${this.history.serverTime}`;
    const answer = await get(`/cache/history${since}`).catch(() => null); // main.js shows a lost server
    if (!answer) return;
    if (this.history.merge(answer)) this.show();
    this.onUpdate();
  }

  show() {
    const requests = this.history.requests.slice(0, this.maxRows);
    this.rows = new Map(requests.map((request) => [request, this.rows.get(request) ?? requestRows(request)]));
    const rows = [...this.rows.values()].flat();
    const focused = document.activeElement;
    this.body.replaceChildren(...(rows.length ? rows : [h("tr", {}, h("td", { colspan: 8, class: "empty" }, "No requests in the last hour."))]));
    if (this.body.contains(focused)) focused.focus({ preventScroll: true });
    const total = this.history.requests.length;
    byId("requests-aside").textContent = total ? `${formatCount(total)} in the last hour; open one for details` : "";
    this.more.hidden = total <= this.maxRows;
  }
}

function requestRows(request) {
  const details = h("tr", { class: "details", hidden: true }, h("td", { colspan: 8 }));
  details.id = `details-${++requestRows.count}`;
  const button = h("button", { type: "button", class: "link", "aria-expanded": "false", "aria-controls": details.id }, formatClock(request.time));
  const row = h("tr", { class: "request", "data-request": request.id }, h("th", { scope: "row" }, button), ...requestCells(request));
  row.addEventListener("click", () => toggleDetails(request, button, details));
  return [row, details];
}
requestRows.count = 0;

function requestCells(request) {
  const { prompt_tokens: prompt, cached_tokens: cached } = request;
  const cell = (text, className = "") => h("td", { class: `number ${className}` }, text);
  const api = APIS.find(([path]) => request.path.startsWith(path))?.[1] ?? request.path;
  return [
    h("td", { class: "wide-only" }, api),
    cell(prompt === null ? "–" : formatCount(prompt), "wide-only"),
    h("td", { class: "number" }, ...(cached === null || !prompt ? ["–"] : [meter("span", "share", cached / prompt), formatCount(cached)])),
    h("td", { class: "miss" }, missOrError(request)),
    cell(divergedAt(request), "wide-only"),
    cell(request.first_token_s === null ? "–" : formatDuration(request.first_token_s)),
    cell(request.tokens_per_s === null ? "–" : request.tokens_per_s.toFixed(1), "wide-only"),
  ];
}

const MISS_TEXTS = { complete: "none: fully cached", new: "the rest is new" };

function missOrError({ status, error, miss }) {
  if (status === 499) return h("span", { class: "muted" }, "client disconnected");
  if (status >= 400 || error) return h("span", { class: "failed" }, error ?? `status ${status}`);
  return h("span", { class: miss === "complete" ? "complete" : "" }, MISS_TEXTS[miss] ?? miss ?? "–");
}

function divergedAt({ divergence, miss, cached_tokens: cached }) {
  if (divergence) return formatCount(divergence.at);
  return miss === "diverged" && cached !== null ? formatCount(cached) : "–";
}

async function toggleDetails(request, button, details) {
  const opens = details.hidden;
  details.hidden = !opens;
  button.setAttribute("aria-expanded", String(opens));
  if (!opens) return;
  details.firstChild.replaceChildren(...describeRequest(request));
  if (!request.session) return;
  const explained = await post("/cache/explain", { session: request.session }).catch(() => null);
  if (explained) details.firstChild.append(h("p", { class: "hint now" }, describeSessionNow(explained)));
}

function describeRequest(request) {
  const { prompt_tokens: prompt, cached_tokens: cached, completion_tokens: written, tokens_per_s: rate } = request;
  const elements = [];
  if (cached !== null && prompt) {
    elements.push(h("p", { class: "headline" }, `${formatCount(cached)} of ${formatCount(prompt)} prompt tokens were cached (${formatPercent(cached, prompt)})`), meter("div", "bar", cached / prompt));
  }
  if (request.meaning) elements.push(h("p", {}, request.meaning));
  if (request.divergence) elements.push(...describeDivergence(request.divergence));
  const speed = [
    request.first_token_s === null ? "" : `time to first token ${formatDuration(request.first_token_s)}`,
    written ? `${formatCount(written)} tokens${rate ? ` at ${rate.toFixed(1)} tokens/s` : ""}` : "",
    `${formatDuration(request.seconds)} in total`,
  ];
  elements.push(h("p", { class: "hint" }, `${request.stream ? "Streamed" : "Not streamed"}, status ${request.status}: ${speed.filter(Boolean).join(", ")}.`));
  elements.push(h("p", { class: "hint id" }, `${request.path}  ${request.id}${request.replica ? `  ${request.replica}` : ""}`));
  return elements;
}

function describeDivergence({ at, where, before, was, now }) {
  const previous = where === "prompt" ? "the previous prompt of its session" : "the previous reply";
  return [
    h("p", {}, `It diverges from ${previous} at token ${formatCount(at)}:`),
    h("p", { class: "context" }, h("span", { class: "hit" }, before), h("mark", {}, now)),
    h("p", { class: "hint" }, `Before, it was ${JSON.stringify(was)}.`),
  ];
}

function describeSessionNow({ cached_tokens: cached, prompt_tokens: prompt, by_tier: byTier, meaning }) {
  const tiers = Object.entries(byTier).filter(([, tokens]) => tokens).map(([tier, tokens]) => `${formatCount(tokens)} ${inTier(tier)}`);
  return `If its session continued now, ${formatCount(cached)} of ${formatCount(prompt)} tokens would be cached${tiers.length ? `: ${tiers.join(", ")}` : ""}. ${meaning}`;
}
