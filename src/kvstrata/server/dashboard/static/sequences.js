// Running requests: a bar for each, as long as its tokens, in parts; upper half keys, lower half values.

import { byId, count, h, size, sum } from "./dom.js";
import { colour } from "./precisions.js";

const LABEL_SHARE = 0.12; // of a bar, below which a part is too narrow for words

export function showSequences(sequences, state) {
  const waiting = state.waiting ? `, ${count(state.waiting)} waiting` : "";
  const key = sequences.length ? "; keys above, values below, outlined where shared" : "";
  byId("running-aside").textContent = `${count(sequences.length)} running${waiting}${key}`;
  const longest = Math.max(1, ...sequences.map((sequence) => sequence.tokens));
  const rows = sequences.map((sequence) => row(sequence, longest));
  byId("sequences").replaceChildren(...(rows.length ? rows : [h("li", { class: "empty" }, "No request is running.")]));
}

function row(sequence, longest) {
  const bytes = sum(sequence.parts.map((part) => part.bytes));
  const bar = h("div", { class: "parts", role: "img", "aria-label": sequence.parts.map(words).join("; ") });
  bar.style.width = `${Math.max(4, (100 * sequence.tokens) / longest)}%`;
  bar.append(...sequence.parts.filter((part) => part.tokens > 0).map((part) => segment(part, sequence.tokens)));
  return h(
    "li",
    { class: "sequence", "data-id": sequence.id },
    h("span", { class: "id", title: sequence.id }, sequence.id),
    h("span", { class: "sum" }, `${count(sequence.tokens)} tokens, ${size(bytes)}`),
    bar,
  );
}

function segment(part, total) {
  const keys = h("i");
  const values = h("i");
  keys.style.background = colour(part.k);
  values.style.background = colour(part.v);
  const element = h("div", { class: part.shared_by > 1 ? "part shared" : "part", title: words(part) }, keys, values);
  element.style.flexGrow = String(part.tokens);
  if (part.tokens / total >= LABEL_SHARE) element.append(h("b", { "aria-hidden": "true" }, precision(part)));
  return element;
}

function words(part) {
  const shared = part.shared_by > 1 ? `, shared by ${part.shared_by}` : "";
  return `${count(part.tokens)} tokens ${precision(part)}, ${size(part.bytes)}${shared}`;
}

const precision = (part) => (part.k === part.v ? part.k : `${part.k} / ${part.v}`);
