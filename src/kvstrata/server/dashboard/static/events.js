// Events: what the server noted in the last hour, in its own sentences, and what this page noticed itself.

import { byId, clock, h } from "./dom.js";

const MAX_EVENTS = 200;

export class Events {
  constructor(history) {
    this.history = history;
    this.own = []; // newest first
    this.list = byId("events");
    this.show();
  }

  add(kind, text) {
    this.own.unshift({ time: Date.now() / 1000, kind, text });
    this.own.length = Math.min(this.own.length, MAX_EVENTS);
    this.show();
  }

  show() {
    const all = [...this.history.events, ...this.own].sort((a, b) => b.time - a.time).slice(0, MAX_EVENTS);
    const rows = all.map(row);
    this.list.replaceChildren(...(rows.length ? rows : [h("li", { class: "empty" }, "Nothing has happened yet.")]));
  }
}

function row({ time, kind, text, replica }) {
  const when = h("time", { datetime: new Date(1000 * time).toISOString() }, clock(time));
  const where = replica ? ` (${replica})` : "";
  return h("li", {}, when, h("span", { class: `kind ${kind.replace(" ", "-")}` }, kind), h("span", { class: "what" }, text + where));
}
