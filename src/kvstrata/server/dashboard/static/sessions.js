// Sessions: requests that belong together, what is held of each conversation, and where prompts last parted.

import { byId, count, h, passed } from "./dom.js";
import { get } from "./server.js";

const EVERY_MS = 5000; // with a disk each look hashes the tokens of all that are shown
const SHOWN = 12;

export class Sessions {
  constructor() {
    this.rows = byId("sessions");
    this.aside = byId("sessions-aside");
    this.looked = -Infinity;
  }

  // main.js calls this after each look at the server; it asks for itself now and then.
  async update() {
    if (performance.now() - this.looked < EVERY_MS) return;
    this.looked = performance.now();
    const answer = await get(`/cache/sessions?limit=${SHOWN}`).catch(() => null); // the page says it when the server is lost
    if (answer) this.show(answer);
  }

  show(answer) {
    const more = answer.total > answer.sessions.length ? `the last ${count(answer.sessions.length)} of ` : "";
    this.aside.textContent = `${more}${count(answer.total)} known`;
    const rows = answer.sessions.map(row);
    this.rows.replaceChildren(...(rows.length ? rows : [h("tr", {}, h("td", { colspan: 6, class: "empty" }, "No request has been answered yet."))]));
  }
}

function row(session) {
  const last = h("time", { datetime: new Date(1000 * session.last_use).toISOString() }, passed(Date.now() / 1000 - session.last_use));
  const parted = session.parted ? [h("p", { class: "parted" }, sentence(session.parted))] : [];
  return h(
    "tr",
    { "data-session": session.id },
    h("th", { scope: "row" }, h("span", { class: "id", title: `by ${session.recognised_by}` }, session.id), ...parted),
    h("td", { class: "number" }, count(session.tokens)),
    h("td", {}, precision(session.precision)),
    h("td", {}, where(session.held)),
    h("td", { class: "number" }, `${(100 * session.hit_rate).toFixed(1)}\u00a0%`),
    h("td", { class: "number" }, last),
  );
}

export function sentence(parted) {
  const whose = parted.where === "prompt" ? "the last prompt" : "the last reply";
  return `Request ${count(parted.request)} parted from ${whose} at token ${count(parted.at)}: it was ${JSON.stringify(parted.was)}, now ${JSON.stringify(parted.now)}.`;
}

function precision({ k, v }) {
  const [keys, values] = [k, v].map((tokens) => Object.keys(tokens).join(" + "));
  return keys === values ? keys || "–" : `${keys} / ${values}`;
}

function where(held) {
  const names = { hot: "memory", disk: "disk" };
  const parts = Object.entries(held).filter(([, tokens]) => tokens);
  return parts.map(([tier, tokens]) => `${names[tier] ?? tier} ${count(tokens)}`).join(", ") || "nowhere";
}
