// The replicas of a fleet: a row for each. One server has none, and shows no table.

import { byId, count, h, percent, size } from "./dom.js";

export function showReplicas(usage, props) {
  const replicas = Object.entries(usage.replicas ?? {});
  byId("replicas-panel").hidden = !replicas.length;
  byId("replicas-aside").textContent = `${count(replicas.length)} behind this address; all other figures are their sum`;
  byId("replicas").replaceChildren(...replicas.map(([name, one]) => row(name, one, props.replicas?.[name]?.state)));
}

function row(name, usage, state) {
  const { hot, disk } = usage.tiers;
  const { queried_tokens: queried = 0, hit_tokens: hit = 0 } = usage.counters;
  const number = (text) => h("td", { class: "number" }, text);
  return h(
    "tr",
    { "data-replica": name },
    h("th", { scope: "row" }, name),
    number(state ? `${count(state.running)}, ${count(state.waiting)}` : "–"),
    number(count(hot.tokens)),
    number(size(hot.bytes)),
    number(disk ? size(disk.bytes) : "–"),
    number(percent(hit, queried)),
  );
}
