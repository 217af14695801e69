// The numbers on top.

import { byId, count, h, percent, plural, sizeParts } from "./dom.js";

export function showFigures(usage, props) {
  const { hot, ...others } = usage.tiers;
  const { queried_tokens: queried = 0, hit_tokens: hit = 0 } = usage.counters;
  const state = props.state;
  const held = hot.bytes + usage.running_bytes;
  const figures = [
    figure("memory", "KV in memory", sizeParts(held), `${usage.under === "key" ? "this key's, " : ""}of ${sizeParts(usage.budget_bytes).join(" ")}`, held / usage.budget_bytes),
    ...Object.entries(others).map(([name, tier]) => figure(name, `KV on ${name}`, sizeParts(tier.bytes), `${count(tier.tokens)} tokens${volume(usage.counters)}`)),
    ...(usage.remote ? [figure("remote", "From other servers", [count(usage.remote.read_tokens), "tokens"], usage.remote.paused_because ? `paused: ${usage.remote.paused_because}` : `${count(usage.remote.written_tokens)} written for them`)] : []),
    figure("stored", "Stored", [count(hot.tokens), "tokens"], plural(hot.spans, "span")),
    figure("hit-rate", "Hit rate", queried ? percent(hit, queried).split("\u00a0") : ["–", ""], `of ${count(queried)} looked up`, queried ? hit / queried : 0),
    figure("hits", "Not computed", [count(hit), "tokens"], "found in the cache"),
    figure("requests", "Requests", [count(state.running), "running"], `${count(state.waiting)} waiting`),
    figure("speed", "Decode", [state.decode_tokens_s.toFixed(1), "tokens/s"], `prefill ${count(state.prefill_tokens_s)}/s`),
    figure("allocator", "MLX holds", sizeParts(usage.allocator_bytes), "weights included"),
  ];
  byId("figures").replaceChildren(...figures);
}

// Where the volume has less room than the disk cache may take.
function volume({ disk_allowed_bytes: allowed = 0, disk_limit_bytes: limit = 0 }) {
  return allowed < limit ? `; the volume has room for ${sizeParts(allowed).join(" ")}, not for ${sizeParts(limit).join(" ")}` : "";
}

function figure(id, name, [value, unit], note, share) {
  const box = h("div", { "data-figure": id }, h("dt", {}, name), h("dd", { class: "value" }, value, h("small", {}, unit)), h("dd", { class: "note" }, note));
  if (share !== undefined) {
    const filled = h("i");
    filled.style.width = `${Math.min(100, 100 * share)}%`;
    box.append(h("dd", { class: "meter", "aria-hidden": "true" }, filled));
  }
  return box;
}
