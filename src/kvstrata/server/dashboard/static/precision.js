// The precision control: a dry run first, then apply what it was run for.

import { confirmed } from "./confirm.js";
import { byId, count, h, percent, plural, size } from "./dom.js";
import { NAMES } from "./precisions.js";
import { get, post, remove } from "./server.js";

const PROGRESS_MS = 400;

export class Precision {
  constructor(onError) {
    this.onError = onError;
    this.form = byId("precision");
    this.result = byId("precision-result");
    this.apply = byId("apply");
    this.ran = null; // what the last dry run was for
    this.cost = null; // what it answered
    for (const select of [this.form.k, this.form.v]) select.append(...NAMES.map((name) => h("option", {}, name)));
    this.form.addEventListener("change", () => this.invalidate());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(true);
    });
    this.apply.addEventListener("click", () => this.confirm());
    byId("cancel").addEventListener("click", () => this.cancel());
  }

  showTarget(usage) {
    const { k, v } = usage.target;
    byId("target").textContent = `new tokens: K ${k}, V ${v}`;
    if (this.touched) return;
    for (const [select, name] of [[this.form.k, k], [this.form.v, v]]) {
      if (![...select.options].some((option) => option.value === name)) select.append(h("option", {}, name));
      select.value = name;
    }
    const disk = this.form.scope.querySelector("[value=disk]");
    disk.hidden = disk.disabled = !("disk" in usage.tiers);
    this.touched = true;
  }

  asked() {
    const { k, v, scope, force } = this.form;
    return { k: k.value, v: v.value, scope: scope.value, force: force.checked };
  }

  invalidate() {
    this.ran = null;
    this.apply.disabled = true;
  }

  // Bits that are dropped do not come back by themselves: whoever drops them is told so first.
  async confirm() {
    const { bytes_before: before, bytes_after: after, target, expected_error: error } = this.cost;
    const lines = () => [
      `${plural(this.cost.spans, "span")} ${this.cost.spans === 1 ? "goes" : "go"} to K ${target.k}, V ${target.v}: ${size(before)} become ${size(after)}, ${size(before - after)} less.`,
      `Scores will be off by about ${percent(error, 1)}.`,
      "What is dropped comes back only from a copy on the disk, or when prompts are computed again.",
    ];
    if (after < before && !(await confirmed({ title: "Store it in fewer bits?", action: "Apply", lines }))) return;
    await this.send(false);
  }

  async send(dryRun) {
    const asked = dryRun ? this.asked() : this.ran;
    const focused = document.activeElement;
    this.form.dry.disabled = this.apply.disabled = true;
    try {
      const answer = await post("/cache/requantize", { ...asked, dry_run: dryRun });
      this.ran = dryRun ? asked : null;
      this.cost = dryRun ? answer : null;
      this.show(answer);
      if (!dryRun) this.follow();
    } catch (error) {
      this.result.replaceChildren(h("p", { class: "error" }, error.message));
      this.onError(error);
    } finally {
      this.form.dry.disabled = false;
      // What was chosen meanwhile has not been tried.
      this.apply.disabled = JSON.stringify(this.ran) !== JSON.stringify(this.asked());
      // A button that is disabled loses the focus, and with it the place of whoever uses the keyboard.
      if (focused === this.form.dry || focused === this.apply) (focused.disabled ? this.form.dry : focused).focus();
    }
  }

  show(answer) {
    const { bytes_before: before, bytes_after: after } = answer;
    const freed = before - after;
    const nothing = answer.spans === 0 && (answer.note || (answer.dry_run ? "Nothing would change" : "Nothing changes"));
    const verb = answer.dry_run ? (freed < 0 ? "would take" : "would free") : freed < 0 ? "takes" : "frees";
    const kept = h("i", { class: "kept" });
    kept.style.width = `${before ? Math.min(100, (100 * after) / before) : 0}%`;
    const left = answer.left_alone.map((it) => {
      const things = plural(it.spans, it.tier === "disk" ? "block" : "span");
      return h("li", {}, `${it.reason}: ${things}, ${size(it.bytes)}`);
    });
    this.result.replaceChildren(
      h("p", { class: "headline" }, nothing || `${answer.dry_run ? "Dry run: " : ""}${verb} ${size(Math.abs(freed))} (${percent(Math.abs(freed), before)})`),
      h("div", { class: "bar", "aria-hidden": "true" }, kept),
      h(
        "dl",
        {},
        ...pair("K, V", `${answer.target.k}, ${answer.target.v}`),
        ...Object.entries(answer.tiers).flatMap(([name, tier]) => pair(TIERS[name] ?? name, tierText(tier))),
        ...pair("spans that change", count(answer.spans)),
        ...pair("scores off by about", percent(answer.expected_error, 1)),
      ),
      ...(left.length ? [h("p", { class: "hint" }, "Left alone:"), h("ul", {}, ...left)] : []),
    );
  }

  async follow() {
    const box = byId("progress");
    for (;;) {
      const progress = await get("/cache/requantize").catch(() => ({ is_running: false }));
      box.hidden = !progress.is_running;
      if (!progress.is_running) return;
      box.querySelector("progress").value = progress.spans_done / Math.max(1, progress.spans_total);
      box.querySelector("span").textContent = `${count(progress.spans_done)} of ${count(progress.spans_total)} spans`;
      await new Promise((resolve) => setTimeout(resolve, PROGRESS_MS));
    }
  }

  async cancel() {
    await remove("/cache/requantize").catch(this.onError);
  }
}

const TIERS = { hot: "memory", disk: "disk" };

function tierText({ bytes_before: before, bytes_after: after, bytes_freed: freed }) {
  const change = freed === 0 ? "as it is" : `${size(Math.abs(freed))} ${freed < 0 ? "more" : "less"}`;
  return `${size(before)} → ${size(after)}, ${change}`;
}

const pair = (name, value) => [h("dt", {}, name), h("dd", {}, value)];
