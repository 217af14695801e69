// Recent requests: how much of each prompt was cached, why not more, where it parted, and how fast it was answered.
//
// A request that has ended does not change: rows are made once, so whoever reads or types in one is not disturbed.

import { byId, clock, count, h, percent, took } from "./dom.js";
import { get, post } from "./server.js";

const EVERY_MS = 2000;
const STEP = 12; // rows that are shown, and more at each click
const APIS = [
  ["/v1/chat/completions", "chat"],
  ["/v1/completions", "completions"],
  ["/v1/messages", "messages"],
  ["/v1/responses", "responses"],
];

export class Requests {
  constructor(history, onNews) {
    this.history = history;
    this.onNews = onNews;
    this.shown = STEP;
    this.rows = new Map(); // request -> its table rows
    this.body = byId("requests");
    this.more = byId("requests-more");
    this.looked = -Infinity;
    this.more.addEventListener("click", () => {
      this.shown += 2 * STEP;
      this.show();
    });
    this.show();
  }

  // main.js calls this after each look at the server; it asks for itself now and then.
  async update() {
    if (performance.now() - this.looked < EVERY_MS) return;
    this.looked = performance.now();
    const since = this.history.now === null ? "" : `?since=${this.history.now}`;
    const answer = await get(`/cache/history${since}`).catch(() => null); // the page says it when the server is lost
    if (!answer) return;
    if (this.history.take(answer)) this.show();
    this.onNews();
  }

  show() {
    const requests = this.history.requests.slice(0, this.shown);
    const known = new Map(requests.map((request) => [request, this.rows.get(request) ?? rowsOf(request)]));
    this.rows = known;
    const rows = [...known.values()].flat();
    const focused = document.activeElement;
    this.body.replaceChildren(...(rows.length ? rows : [h("tr", {}, h("td", { colspan: 8, class: "empty" }, "No request has been answered in the last hour."))]));
    if (this.body.contains(focused)) focused.focus({ preventScroll: true });
    const total = this.history.requests.length;
    byId("requests-aside").textContent = total ? `${count(total)} in the last hour; open one to see why` : "";
    this.more.hidden = total <= this.shown;
  }
}

function rowsOf(request) {
  const details = h("tr", { class: "details", hidden: true }, h("td", { colspan: 8 }));
  const id = `why-${++rowsOf.number}`;
  details.id = id;
  const button = h("button", { type: "button", class: "link", "aria-expanded": "false", "aria-controls": id }, clock(request.time));
  const row = h("tr", { class: "request", "data-request": request.id }, h("th", { scope: "row" }, button), ...cells(request));
  row.addEventListener("click", () => toggle(request, button, details));
  return [row, details];
}
rowsOf.number = 0;

function cells(request) {
  const { prompt_tokens: prompt, cached_tokens: cached } = request;
  const number = (text, className = "") => h("td", { class: `number ${className}` }, text);
  const api = APIS.find(([path]) => request.path.startsWith(path))?.[1] ?? request.path;
  return [
    h("td", { class: "spare" }, api),
    number(prompt === null ? "–" : count(prompt), "spare"),
    h("td", { class: "number" }, ...(cached === null || !prompt ? ["–"] : [share(cached, prompt), `${count(cached)}`])),
    h("td", { class: "miss" }, ...miss(request)),
    number(divergedAt(request), "spare"),
    number(request.first_token_s === null ? "–" : took(request.first_token_s)),
    number(request.tokens_per_s === null ? "–" : request.tokens_per_s.toFixed(1), "spare"),
  ];
}

function share(cached, prompt) {
  const filled = h("i");
  filled.style.width = `${(100 * cached) / prompt}%`;
  return h("span", { class: "share", "aria-hidden": "true" }, filled);
}

function miss(request) {
  if (request.status === 499) return [h("span", { class: "quiet" }, "the client left")];
  if (request.status >= 400 || request.error) return [h("span", { class: "failed" }, request.error ?? `status ${request.status}`)];
  return [h("span", { class: request.miss === "complete" ? "whole" : "" }, WORDS[request.miss] ?? request.miss ?? "–")];
}

const WORDS = { complete: "nothing: all was cached", new: "the rest is new" };

function divergedAt({ parted, miss: why, cached_tokens: cached }) {
  if (parted) return count(parted.at);
  return why === "diverged" && cached !== null ? count(cached) : "–";
}

async function toggle(request, button, details) {
  const opens = details.hidden;
  details.hidden = !opens;
  button.setAttribute("aria-expanded", String(opens));
  if (!opens) return;
  details.firstChild.replaceChildren(...explanation(request));
  if (!request.session) return;
  const now = await post("/cache/explain", { session: request.session }).catch(() => null);
  if (now) details.firstChild.append(h("p", { class: "hint now" }, inTime(now)));
}

// What is known of a request, in sentences.
function explanation(request) {
  const { prompt_tokens: prompt, cached_tokens: cached, parted } = request;
  const found = [];
  if (cached !== null && prompt) {
    const kept = h("i", { class: "kept" });
    kept.style.width = `${(100 * cached) / prompt}%`;
    found.push(h("p", { class: "headline" }, `${count(cached)} of ${count(prompt)} prompt tokens were cached (${percent(cached, prompt)})`), h("div", { class: "bar", "aria-hidden": "true" }, kept));
  }
  if (request.meaning) found.push(h("p", {}, request.meaning));
  if (parted) found.push(...divergence(parted));
  const speed = [
    request.first_token_s === null ? "" : `first token after ${took(request.first_token_s)}`,
    request.completion_tokens ? `${count(request.completion_tokens)} tokens${request.tokens_per_s ? ` at ${request.tokens_per_s.toFixed(1)} a second` : ""}` : "",
    `${took(request.seconds)} in all`,
  ];
  found.push(h("p", { class: "hint" }, `${request.stream ? "Streamed" : "Answered whole"}, status ${request.status}: ${speed.filter(Boolean).join(", ")}.`));
  found.push(h("p", { class: "hint id" }, `${request.path}  ${request.id}${request.replica ? `  ${request.replica}` : ""}`));
  return found;
}

function divergence({ at, where, before, was, now }) {
  const whose = where === "prompt" ? "the prompt before it in its session" : "the reply before it";
  return [
    h("p", {}, `It parts from ${whose} at token ${count(at)}:`),
    h("p", { class: "around" }, h("span", { class: "hit" }, before), h("mark", {}, now)),
    h("p", { class: "hint" }, `There it was ${JSON.stringify(was)}.`),
  ];
}

function inTime({ cached_tokens: cached, prompt_tokens: prompt, by_tier: tiers, meaning }) {
  const names = { hot: "memory", disk: "the disk", remote: "the shared store" };
  const where = Object.entries(tiers).filter(([, tokens]) => tokens).map(([tier, tokens]) => `${count(tokens)} in ${names[tier] ?? tier}`);
  return `If its session went on now, ${count(cached)} of ${count(prompt)} tokens would be found${where.length ? `: ${where.join(", ")}` : ""}. ${meaning}`;
}
