// Sessions with their cached tokens and latest divergence, and the form that explains a cache miss.

import { byId, formatAge, formatCount, formatPercent, h, meter } from "./dom.js";
import { get, post, tierName } from "./server.js";

const POLL_MS = 5000; // with a disk tier the server hashes the tokens of all listed sessions for each answer
const LIMIT = 12;

export class SessionTable {
  constructor() {
    this.rows = byId("sessions");
    this.aside = byId("sessions-aside");
    this.polledAt = -Infinity;
  }

  // Called by main.js once a second; polls at its own interval.
  async update() {
    if (performance.now() - this.polledAt < POLL_MS) return;
    this.polledAt = performance.now();
    const answer = await get(`/cache/sessions?limit=${LIMIT}`).catch(() => null); // main.js shows a lost server
    if (answer) this.show(answer);
  }

  show(answer) {
    const newest = answer.total > answer.sessions.length ? `the last ${formatCount(answer.sessions.length)} of ` : "";
    this.aside.textContent = `${newest}${formatCount(answer.total)} known`;
    const rows = answer.sessions.map(sessionRow);
    this.rows.replaceChildren(...(rows.length ? rows : [h("tr", {}, h("td", { colspan: 6, class: "empty" }, "No requests yet."))]));
  }
}

function sessionRow(session) {
  const lastUse = h("time", { datetime: new Date(1000 * session.last_use).toISOString() }, formatAge(Date.now() / 1000 - session.last_use));
  const divergence = session.divergence ? [h("p", { class: "divergence" }, describeDivergence(session.divergence))] : [];
  return h(
    "tr",
    { "data-session": session.id },
    h("th", { scope: "row" }, h("span", { class: "id", title: `recognised by ${session.recognised_by}` }, session.id), ...divergence),
    h("td", { class: "number" }, formatCount(session.tokens)),
    h("td", {}, precisionNames(session.precision)),
    h("td", {}, cachedByTier(session.held)),
    h("td", { class: "number" }, `${(100 * session.hit_rate).toFixed(1)}\u00a0%`),
    h("td", { class: "number" }, lastUse),
  );
}

function describeDivergence({ request, where, at, was, now }) {
  const previous = where === "prompt" ? "the previous prompt" : "the previous reply";
  return `Request ${formatCount(request)} diverged from ${previous} at token ${formatCount(at)}: it was ${JSON.stringify(was)}, now ${JSON.stringify(now)}.`;
}

// A session may have tokens in several precisions.
function precisionNames({ k, v }) {
  const [keys, values] = [k, v].map((tokens) => Object.keys(tokens).join(" + "));
  return keys === values ? keys || "–" : `${keys} / ${values}`;
}

function cachedByTier(held) {
  const tiers = Object.entries(held).filter(([, tokens]) => tokens);
  return tiers.map(([tier, tokens]) => `${tierName(tier)} ${formatCount(tokens)}`).join(", ") || "not cached";
}

// The length of a prompt's cached prefix, and the text around the token where it ends.
export class ExplainForm {
  constructor(onError) {
    this.onError = onError;
    this.form = byId("explain");
    this.result = byId("explain-result");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
  }

  async send() {
    try {
      this.show(await post("/cache/explain", this.body()));
    } catch (error) {
      this.result.replaceChildren(h("p", { class: "error" }, error.message));
      this.onError(error);
    }
  }

  body() {
    const text = this.form.text.value;
    const salt = this.form.salt.value ? { cache_salt: this.form.salt.value } : {};
    if (this.form.kind.value === "chat") return { messages: [{ role: "user", content: text }], ...salt };
    if (this.form.kind.value === "prompt") return { prompt: text, ...salt };
    return { ...JSON.parse(text), ...salt };
  }

  show(answer) {
    const { cached_tokens: cached, prompt_tokens: prompt, session } = answer;
    this.result.replaceChildren(
      h("p", { class: "headline" }, `${formatCount(cached)} of ${formatCount(prompt)} tokens are cached (${formatPercent(cached, prompt)})`),
      meter("div", "bar", cached / prompt),
      h("p", {}, `The cached prefix ends at token ${formatCount(answer.at_token)}, ${answer.ends_because}: ${answer.meaning}`),
      h("p", { class: "context" }, h("span", { class: "hit" }, answer.before), h("mark", {}, answer.after)),
      ...hints(answer, session?.divergence ? `Session ${session.id}: ${describeDivergence(session.divergence)}` : "").map((text) => h("p", { class: "hint" }, text)),
    );
  }
}

function hints(answer, divergence) {
  const alternatives = answer.instead.map((text) => JSON.stringify(text)).join(" or ");
  const tiers = Object.entries(answer.by_tier).filter(([, tokens]) => tokens);
  return [
    alternatives ? `Cached there instead: ${alternatives}` : "",
    divergence,
    ...promptChanges(answer),
    answer.remote_paused_because ? `The remote cache is paused: ${answer.remote_paused_because}` : "",
    tiers.map(([tier, tokens]) => `${formatCount(tokens)} from ${tierName(tier)}`).join(", "),
  ].filter(Boolean);
}

const HYGIENE_RULES = {
  nonce: "lines that change with every request were left out of system messages",
  system_in_place: "system messages in the middle of the chat stayed where they are",
};

// Changes that the server made to the prompt to keep it stable from turn to turn.
function promptChanges({ replayed_turns: turns, replayed_tokens: tokens, hygiene }) {
  const replies = turns === 1 ? "1 earlier reply is" : `${formatCount(turns)} earlier replies are`;
  const replayed = turns ? [`${replies} replayed as sampled: ${formatCount(tokens)} tokens.`] : [];
  return [...replayed, ...Object.entries(hygiene).map(([rule, times]) => `${HYGIENE_RULES[rule] ?? rule}: ${formatCount(times)}.`)];
}
