// Conversations in the cache: a bar for each, made of segments that are coloured by precision and patterned by tier. A shared
// prefix is drawn once, in one conversation's bar; the bars of the others start where they diverge from it. The most recently
// used conversation is at the bottom.

import { byId, confirmed, formatAge, formatBytes, formatCount, formatDuration, h, plural, s, sum } from "./dom.js";
import { fewestBitsFirst, keyValueHalves, precisionName, swatch } from "./precision.js";
import { get, inTier, post, remove } from "./server.js";

const POLL_MS = 4000; // with a disk tier the server hashes the tokens of all listed conversations for each answer

export class ConversationList {
  constructor(onError) {
    this.onError = onError;
    this.list = byId("conversations");
    this.message = byId("conversations-message");
    this.polledAt = -Infinity;
    this.drawnJson = "";
    this.usage = this.props = null;
    this.rows = [];
    byId("clear").addEventListener("click", () => this.clear());
    this.list.addEventListener("click", (event) => this.runAction(event.target.closest("button[data-action]")));
    new ResizeObserver(() => this.drawBranches()).observe(this.list);
  }

  // Called by main.js once a second; polls at its own interval.
  async update(usage, props) {
    this.usage = usage;
    this.props = props;
    if (performance.now() - this.polledAt < POLL_MS || document.hidden) return;
    await this.poll();
  }

  async poll() {
    this.polledAt = performance.now();
    const answer = await get("/cache/conversations").catch(() => null); // main.js shows a lost server
    if (answer) this.show(answer);
  }

  show({ conversations: rows, has_more: hasMore }) {
    const number = `${hasMore ? "the last " : ""}${formatCount(rows.length)}`;
    byId("conversations-aside").textContent = rows.length ? `${number}, last used at the bottom; each bar starts where it diverges` : "";
    byId("clear").hidden = !rows.length && !this.usage?.tiers.disk?.tokens;
    // Unchanged rows are not replaced, so that keyboard users keep the focus.
    const json = JSON.stringify(rows);
    if (json === this.drawnJson) return this.updateAges();
    this.drawnJson = json;
    this.rows = rows;
    const focused = document.activeElement?.closest?.("#conversations button");
    const longest = this.longest();
    const items = rows.map((row) => listItem(row, longest));
    this.list.replaceChildren(...(items.length ? items : [h("li", { class: "empty" }, "Nothing is cached yet.")]));
    if (focused) this.list.querySelector(`[data-id="${focused.dataset.id}"][data-action="${focused.dataset.action}"]`)?.focus({ preventScroll: true });
    byId("conversations-keys").replaceChildren(...legend(rows.flatMap((row) => row.parts)));
    this.drawBranches();
  }

  updateAges() {
    for (const element of this.list.querySelectorAll("time")) element.textContent = formatAge(Date.now() / 1000 - Number(element.dataset.time));
  }

  longest() {
    return Math.max(1, ...this.rows.map((row) => row.tokens));
  }

  // Dotted lines from the bar with the shared prefix down to the start of each bar that diverges from it.
  drawBranches() {
    const svg = byId("branches");
    const box = svg.parentElement.getBoundingClientRect();
    const bars = new Map([...this.list.querySelectorAll(".track")].map((track) => [track.dataset.id, track.getBoundingClientRect()]));
    svg.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    const longest = this.longest();
    svg.replaceChildren(
      ...this.rows.filter((row) => row.above && bars.has(row.id) && bars.has(row.above)).map((row) => {
        const [to, from] = [bars.get(row.id), bars.get(row.above)];
        const x = to.left - box.left + (row.starts_at / longest) * to.width;
        return s("path", { d: `M${x.toFixed(1)},${(from.bottom - box.top).toFixed(1)}V${(to.bottom - box.top).toFixed(1)}` });
      }),
    );
  }

  async runAction(button) {
    if (!button) return;
    const { id, action } = button.dataset;
    try {
      if (action === "drop") await this.drop(id);
      else {
        const { tokens } = await post(`/cache/conversations/${id}/${action}`, {});
        this.showMessage(action === "pin" ? `Pinned: ${plural(tokens, "token")} will not be evicted.` : "Unpinned: it is evictable again.");
      }
    } catch (error) {
      this.showMessage(error.message, "error");
      this.onError(error);
    }
    this.drawnJson = "";
    await this.poll();
  }

  async drop(id) {
    const path = `/cache/conversations/${id}`;
    const cost = await remove(`${path}?dry_run=true`);
    if (cost.kept_because) {
      return this.showMessage(cost.kept_because === "pinned" ? "It is pinned. Unpin it first." : "A running request uses it. Try again when that request has finished.");
    }
    const tokens = Math.max(cost.tokens, cost.disk_tokens);
    if (!tokens) return this.showMessage("Other conversations share all of its tokens: there is nothing to drop.");
    const lines = () => [
      `${describeTokens(cost.tokens, cost.bytes, "hot")}${cost.disk_tokens ? ` and ${describeTokens(cost.disk_tokens, cost.disk_bytes, "disk")}` : ""} that no other conversation has.`,
      this.recomputeCost(tokens),
    ];
    if (!(await confirmed({ title: "Drop this conversation?", action: "Drop", lines }))) return;
    const freed = await remove(path);
    this.showMessage(`Dropped: ${formatBytes(freed.bytes + freed.disk_bytes)} freed.`);
  }

  async clear() {
    const { tiers, under } = this.usage;
    const names = (choice) => (choice === "all" ? ["hot", "disk"] : [choice]);
    const lines = (choice) => [
      `${names(choice).map((name) => describeTokens(tiers[name].tokens, tiers[name].bytes, name)).join(" and ")}${under === "key" ? ", of this key" : ""}. Pinned entries and entries in use stay in memory.`,
      choice === "hot" && tiers.disk ? "Tokens that are also on the disk can be loaded again." : this.recomputeCost(Math.max(...names(choice).map((name) => tiers[name].tokens))),
    ];
    const choices = tiers.disk ? [["hot", "memory"], ["disk", "disk"], ["all", "both"]] : [["hot", "memory"]];
    const tier = await confirmed({ title: "Clear the cache?", action: "Clear", lines, choices });
    if (!tier) return;
    try {
      const cleared = await post("/cache/clear", { tier });
      this.showMessage(`Cleared: ${plural(cleared.tokens, "token")}, ${formatBytes(cleared.bytes)}. ${formatBytes(cleared.bytes_left)} remain.`);
    } catch (error) {
      this.showMessage(error.message, "error");
      this.onError(error);
    }
    await this.poll();
  }

  recomputeCost(tokens) {
    const rate = this.props?.state.prefill_tokens_s;
    return `Requests that need them compute them again: ${plural(tokens, "token")}${rate ? `, about ${formatDuration(tokens / rate)} at ${formatCount(rate)} tokens/s` : ""}.`;
  }

  showMessage(text, className = "") {
    this.message.replaceChildren(h("span", { class: className }, text));
  }
}

const describeTokens = (tokens, bytes, tier) => `${plural(tokens, "token")} (${formatBytes(bytes)}) ${inTier(tier)}`;

function listItem(row, longest) {
  const name = row.session ?? row.id.slice(0, 12);
  const bytes = sum(row.parts.map((part) => part.bytes));
  const track = h("div", { class: "track", "data-id": row.id, role: "img", "aria-label": describeRow(row) });
  let start = row.starts_at;
  for (const part of row.parts) {
    track.append(segment(part, start, longest));
    start += part.tokens;
  }
  const notes = [row.running && "running", row.pinned && "pinned", row.left_behind && "superseded", row.replica].filter(Boolean);
  const lastUse = h("time", { datetime: new Date(1000 * row.last_use).toISOString(), "data-time": row.last_use }, formatAge(Date.now() / 1000 - row.last_use));
  return h(
    "li",
    { class: `conversation${row.left_behind ? " superseded" : ""}`, "data-conversation": row.id },
    h("span", { class: "name" }, h("span", { class: "id", title: name }, name), ...notes.map((note) => h("em", {}, note))),
    track,
    h("span", { class: "sum" }, `${formatCount(row.tokens)} tokens, ${formatBytes(bytes)}, `, lastUse),
    h("span", { class: "actions" }, ...actionButtons(row, name)),
  );
}

function actionButtons(row, name) {
  const button = (action, label) => h("button", { type: "button", class: "link", "data-action": action, "data-id": row.id, "aria-label": `${label} ${name}` }, label);
  const isInMemory = row.parts.some((part) => part.tier === "hot");
  const pin = row.pinned ? [button("unpin", "Unpin")] : isInMemory ? [button("pin", "Pin")] : [];
  // This server does not delete from the shared store.
  return [...pin, ...(row.parts.some((part) => part.tier !== "remote") ? [button("drop", "Drop")] : [])];
}

function segment(part, start, longest) {
  const copies = part.also.map((tier) => `copy-${tier}`).join(" ");
  const element = h("div", { class: `segment ${part.tier} ${copies} ${part.pinned ? "pinned" : ""}`, title: describePart(part) }, ...keyValueHalves(part));
  element.style.left = `${(100 * start) / longest}%`;
  element.style.width = `${(100 * part.tokens) / longest}%`;
  return element;
}

function describePart(part) {
  const copies = part.also.length ? `, a copy ${part.also.map(inTier).join(" and ")}` : "";
  return `${plural(part.tokens, "token")}, ${precisionName(part)}, ${inTier(part.tier)}${copies}${part.pinned ? ", pinned" : ""}`;
}

function describeRow(row) {
  const shared = row.above ? `shares its first ${plural(row.starts_at, "token")} with the one above; ` : "";
  return `${shared}${row.parts.map(describePart).join("; ")}`;
}

// Explains only the colours and patterns that are drawn.
function legend(parts) {
  const formats = fewestBitsFirst(new Set(parts.flatMap((part) => [part.k, part.v]).filter(Boolean))).reverse();
  const pattern = (className, text) => h("li", {}, h("span", { class: `swatch ${className}` }), text);
  const has = (test) => parts.some(test);
  return [
    ...formats.map((format) => h("li", {}, swatch(format), format)),
    ...(has((part) => part.tier === "disk") ? [pattern("disk", "only on the disk")] : []),
    ...(has((part) => part.tier === "remote") ? [pattern("remote", "only in the shared store")] : []),
    ...(has((part) => part.also.includes("disk")) ? [pattern("copy-disk", "a copy on the disk")] : []),
    ...(has((part) => part.also.includes("remote")) ? [pattern("copy-remote", "a copy in the shared store")] : []),
    ...(has((part) => part.k !== part.v) ? [h("li", {}, "keys above, values below")] : []),
  ];
}
