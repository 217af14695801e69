// The conversations in the cache as strata: each a bar of parts, coloured by precision and drawn by tier. What several share
// is drawn once; the others begin where they part from it. The last used is at the bottom.

import { confirmed } from "./confirm.js";
import { byId, count, h, passed, plural, s, size, sum, took } from "./dom.js";
import { colour, deepestFirst } from "./precisions.js";
import { get, post, remove } from "./server.js";

const EVERY_MS = 4000; // with a disk each look hashes the tokens of all that are shown
const TIERS = { hot: "memory", disk: "disk", remote: "shared store" };

export class Conversations {
  constructor(onError) {
    this.onError = onError;
    this.list = byId("conversations");
    this.said = byId("conversations-said");
    this.looked = -Infinity;
    this.seen = "";
    this.usage = this.props = null;
    this.rows = [];
    byId("clear").addEventListener("click", () => this.clear());
    this.list.addEventListener("click", (event) => this.act(event.target.closest("button[data-act]")));
    new ResizeObserver(() => this.joints()).observe(this.list);
  }

  // main.js calls this after each look at the server; it asks for itself now and then.
  async update(usage, props) {
    this.usage = usage;
    this.props = props;
    if (performance.now() - this.looked < EVERY_MS || document.hidden) return;
    await this.look();
  }

  async look() {
    this.looked = performance.now();
    const answer = await get("/cache/conversations").catch(() => null); // the page says it when the server is lost
    if (answer) this.show(answer);
  }

  show({ conversations: rows, has_more: hasMore }) {
    const told = `${hasMore ? `the last ${count(rows.length)}` : count(rows.length)}, the last used at the bottom; each begins where it parts from another`;
    byId("conversations-aside").textContent = rows.length ? told : "";
    byId("clear").hidden = !rows.length && !this.usage?.tiers.disk?.tokens;
    // A row that has not changed stays, and with it the place of whoever uses the keyboard.
    const seen = JSON.stringify(rows);
    if (seen === this.seen) return this.age();
    this.seen = seen;
    this.rows = rows;
    const focused = document.activeElement?.closest?.("#conversations button");
    const place = focused && [focused.dataset.id, focused.dataset.act];
    const longest = Math.max(1, ...rows.map((row) => row.tokens));
    const made = rows.map((row) => item(row, longest));
    this.list.replaceChildren(...(made.length ? made : [h("li", { class: "empty" }, "Nothing is cached yet.")]));
    if (place) this.list.querySelector(`[data-id="${place[0]}"][data-act="${place[1]}"]`)?.focus({ preventScroll: true });
    byId("conversations-keys").replaceChildren(...keys(rows));
    this.joints();
  }

  age() {
    for (const element of this.list.querySelectorAll("time")) element.textContent = passed(Date.now() / 1000 - Number(element.dataset.at));
  }

  // From the bar that has what is shared down to where another one begins.
  joints() {
    const svg = byId("joints");
    const box = svg.parentElement.getBoundingClientRect();
    const bars = new Map([...this.list.querySelectorAll(".track")].map((track) => [track.dataset.id, track.getBoundingClientRect()]));
    svg.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    const longest = Math.max(1, ...this.rows.map((row) => row.tokens));
    svg.replaceChildren(
      ...this.rows.filter((row) => row.above && bars.has(row.id) && bars.has(row.above)).map((row) => {
        const [to, from] = [bars.get(row.id), bars.get(row.above)];
        const x = to.left - box.left + (row.starts_at / longest) * to.width;
        return s("path", { d: `M${x.toFixed(1)},${(from.bottom - box.top).toFixed(1)}V${(to.bottom - box.top).toFixed(1)}` });
      }),
    );
  }

  async act(button) {
    if (!button) return;
    const { id, act } = button.dataset;
    try {
      if (act === "drop") await this.drop(id);
      else {
        const { tokens } = await post(`/cache/conversations/${id}/${act}`, {});
        this.say(act === "pin" ? `${plural(tokens, "token")} will stay, whatever else has to go.` : "It may go again when room is needed.");
      }
    } catch (error) {
      this.say(error.message, "error");
      this.onError(error);
    }
    this.seen = "";
    await this.look();
  }

  async drop(id) {
    const path = `/cache/conversations/${id}`;
    const cost = await remove(`${path}?dry_run=true`);
    if (cost.kept_because) return this.say(cost.kept_because === "pinned" ? "It is pinned. Unpin it first." : "A request is using it now. Try again when that has ended.");
    const tokens = Math.max(cost.tokens, cost.disk_tokens);
    if (!tokens) return this.say("Other conversations have all of it: there is nothing to drop.");
    const lines = () => [
      `${held(cost.tokens, cost.bytes, "memory")}${cost.disk_tokens ? ` and ${held(cost.disk_tokens, cost.disk_bytes, "the disk")}` : ""} that no other conversation has.`,
      this.again(tokens),
    ];
    if (!(await confirmed({ title: "Drop this conversation?", action: "Drop", lines }))) return;
    const gone = await remove(path);
    this.say(`Dropped: ${size(gone.bytes + gone.disk_bytes)} freed.`);
  }

  async clear() {
    const { hot, disk } = this.usage.tiers;
    const each = { hot: [hot, "memory"], disk: [disk, "the disk"] };
    const counted = (choice) => (choice === "all" ? [each.hot, each.disk] : [each[choice]]);
    const lines = (choice) => [
      `${counted(choice).map(([tier, where]) => held(tier.tokens, tier.bytes, where)).join(" and ")}${this.usage.under === "key" ? ", of this key" : ""}. What is pinned or in use stays in memory.`,
      ...(choice === "hot" && disk ? ["What the disk has too can be read again."] : [this.again(Math.max(...counted(choice).map(([tier]) => tier.tokens)))]),
    ];
    const choices = disk ? [["hot", "memory"], ["disk", "disk"], ["all", "both"]] : [["hot", "memory"]];
    const tier = await confirmed({ title: "Clear the cache?", action: "Clear", lines, choices });
    if (!tier) return;
    try {
      const gone = await post("/cache/clear", { tier });
      this.say(`Cleared: ${plural(gone.tokens, "token")}, ${size(gone.bytes)}. ${size(gone.bytes_left)} stay.`);
    } catch (error) {
      this.say(error.message, "error");
      this.onError(error);
    }
    await this.look();
  }

  // What it costs to have them back.
  again(tokens) {
    const rate = this.props?.state.prefill_tokens_s;
    return `Requests that need them compute them again: ${plural(tokens, "token")}${rate ? `, about ${took(tokens / rate)} at ${count(rate)} tokens a second` : ""}.`;
  }

  say(text, className = "") {
    this.said.replaceChildren(h("span", { class: className }, text));
  }
}

const held = (tokens, bytes, where) => `${plural(tokens, "token")} (${size(bytes)}) in ${where}`.replace("in the disk", "on the disk");

function item(row, longest) {
  const name = row.session ?? row.id.slice(0, 12);
  const bytes = sum(row.parts.map((part) => part.bytes));
  const track = h("div", { class: "track", "data-id": row.id, role: "img", "aria-label": spoken(row) });
  let at = row.starts_at;
  for (const part of row.parts) {
    track.append(segment(part, at, longest));
    at += part.tokens;
  }
  const notes = [row.running && "running", row.pinned && "pinned", row.left_behind && "left behind", row.replica].filter(Boolean);
  const when = h("time", { datetime: new Date(1000 * row.last_use).toISOString(), "data-at": row.last_use }, passed(Date.now() / 1000 - row.last_use));
  return h(
    "li",
    { class: `conversation${row.left_behind ? " behind" : ""}`, "data-conversation": row.id },
    h("span", { class: "who" }, h("span", { class: "id", title: name }, name), ...notes.map((note) => h("em", {}, note))),
    track,
    h("span", { class: "sum" }, `${count(row.tokens)} tokens, ${size(bytes)}, `, when),
    h("span", { class: "acts" }, ...acts(row, name)),
  );
}

function acts(row, name) {
  const inMemory = row.parts.some((part) => part.tier === "hot");
  const act = (what, label) => h("button", { type: "button", class: "link", "data-act": what, "data-id": row.id, "aria-label": `${label} ${name}` }, label);
  const pin = row.pinned ? [act("unpin", "Unpin")] : inMemory ? [act("pin", "Pin")] : [];
  // What is in the shared store alone is not this server's to drop.
  return [...pin, ...(row.parts.some((part) => part.tier !== "remote") ? [act("drop", "Drop")] : [])];
}

function segment(part, at, longest) {
  const keys = h("i");
  const values = h("i");
  keys.style.background = colour(part.k || "other");
  values.style.background = colour(part.v || "other");
  const copies = part.also.map((tier) => `copy-${tier}`).join(" ");
  const element = h("div", { class: `stratum ${part.tier} ${copies} ${part.pinned ? "pinned" : ""}`, title: words(part) }, keys, values);
  element.style.left = `${(100 * at) / longest}%`;
  element.style.width = `${(100 * part.tokens) / longest}%`;
  return element;
}

const precision = (part) => (part.k === part.v ? part.k || "unknown precision" : `${part.k} / ${part.v}`);

function words(part) {
  const copies = part.also.length ? `, a copy on ${part.also.map((tier) => `the ${TIERS[tier]}`).join(" and ")}` : "";
  return `${plural(part.tokens, "token")}, ${precision(part)}, ${part.tier === "hot" ? "in" : "on the"} ${TIERS[part.tier]}${copies}${part.pinned ? ", pinned" : ""}`;
}

function spoken(row) {
  const from = row.above ? `shares its first ${plural(row.starts_at, "token")} with the one above; ` : "";
  return `${from}${row.parts.map(words).join("; ")}`;
}

// Only what is there to be seen.
function keys(rows) {
  const parts = rows.flatMap((row) => row.parts);
  const names = deepestFirst(new Set(parts.flatMap((part) => [part.k, part.v]).filter(Boolean))).reverse();
  const colours = names.map((name) => {
    const swatch = h("span", { class: "swatch" });
    swatch.style.background = colour(name);
    return h("li", {}, swatch, name);
  });
  const pattern = (className, text) => h("li", {}, h("span", { class: `swatch ${className}` }), text);
  const has = (test) => parts.some(test);
  return [
    ...colours,
    ...(has((part) => part.tier === "disk") ? [pattern("disk", "on the disk alone")] : []),
    ...(has((part) => part.tier === "remote") ? [pattern("remote", "in the shared store alone")] : []),
    ...(has((part) => part.also.includes("disk")) ? [pattern("copy-disk", "a copy on the disk")] : []),
    ...(has((part) => part.also.includes("remote")) ? [pattern("copy-remote", "a copy in the shared store")] : []),
    ...(has((part) => part.k !== part.v) ? [h("li", {}, "keys above, values below")] : []),
  ];
}
