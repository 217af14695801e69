// Running requests as bars, and the replicas of a fleet as a table.
//
// A request's bar is as long as its tokens and has a part for each precision: keys in the upper half, values in the lower.

import { byId, formatBytes, formatCount, formatPercent, h, sum } from "./dom.js";
import { keyValueHalves, precisionName } from "./precision.js";

const LABEL_SHARE = 0.12; // of a bar, below which a part is too narrow for its label

export function showSequences(sequences, state) {
  const waiting = state.waiting ? `, ${formatCount(state.waiting)} waiting` : "";
  const key = sequences.length ? "; keys above, values below, outlined where shared" : "";
  byId("running-aside").textContent = `${formatCount(sequences.length)} running${waiting}${key}`;
  const longest = Math.max(1, ...sequences.map((sequence) => sequence.tokens));
  const rows = sequences.map((sequence) => sequenceRow(sequence, longest));
  byId("sequences").replaceChildren(...(rows.length ? rows : [h("li", { class: "empty" }, "No request is running.")]));
}

function sequenceRow(sequence, longest) {
  const bytes = sum(sequence.parts.map((part) => part.bytes));
  const bar = h("div", { class: "parts", role: "img", "aria-label": sequence.parts.map(describePart).join("; ") });
  bar.style.width = `${Math.max(4, (100 * sequence.tokens) / longest)}%`;
  bar.append(...sequence.parts.filter((part) => part.tokens > 0).map((part) => partElement(part, sequence.tokens)));
  return h(
    "li",
    { class: "sequence", "data-id": sequence.id },
    h("span", { class: "id", title: sequence.id }, sequence.id),
    h("span", { class: "sum" }, `${formatCount(sequence.tokens)} tokens, ${formatBytes(bytes)}`),
    bar,
  );
}

function partElement(part, total) {
  const element = h("div", { class: part.shared_by > 1 ? "part shared" : "part", title: describePart(part) }, ...keyValueHalves(part));
  element.style.flexGrow = String(part.tokens);
  if (part.tokens / total >= LABEL_SHARE) element.append(h("b", { "aria-hidden": "true" }, precisionName(part)));
  return element;
}

function describePart(part) {
  const shared = part.shared_by > 1 ? `, shared by ${part.shared_by}` : "";
  return `${formatCount(part.tokens)} tokens ${precisionName(part)}, ${formatBytes(part.bytes)}${shared}`;
}

// A single server has no replicas; its page hides the table.
export function showReplicas(usage, props) {
  const replicas = Object.entries(usage.replicas ?? {});
  byId("replicas-panel").hidden = !replicas.length;
  byId("replicas-aside").textContent = `${formatCount(replicas.length)} behind this address; all other figures are their sum`;
  byId("replicas").replaceChildren(...replicas.map(([name, replica]) => replicaRow(name, replica, props.replicas?.[name]?.state)));
}

function replicaRow(name, usage, state) {
  const { hot, disk } = usage.tiers;
  const { queried_tokens: queried = 0, hit_tokens: hit = 0 } = usage.counters;
  const cell = (text) => h("td", { class: "number" }, text);
  return h(
    "tr",
    { "data-replica": name },
    h("th", { scope: "row" }, name),
    cell(state ? `${formatCount(state.running)}, ${formatCount(state.waiting)}` : "–"),
    cell(formatCount(hot.tokens)),
    cell(formatBytes(hot.bytes)),
    cell(disk ? formatBytes(disk.bytes) : "–"),
    cell(formatPercent(hit, queried)),
  );
}
