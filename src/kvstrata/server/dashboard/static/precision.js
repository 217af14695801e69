// KV formats (names, colours, order in charts), and the form that changes the precision of cached KV: a dry run first,
// then the same request again without `dry_run`.

import { byId, confirmed, formatBytes, formatCount, formatPercent, h, meter, plural } from "./dom.js";
import { get, post, remove, tierName } from "./server.js";

const FORMATS = [
  "raw",
  "planes:8", "planes:4", "planes:2",
  "affine:8", "affine:6", "affine:5", "affine:4", "affine:3", "affine:2",
];
const PROGRESS_MS = 400;
// Layers of the memory chart that are no KV format.
export const RUNNING = "running";
export const OTHER = "other";

// 16 stands for raw, whatever type the model computes in.
function bitsOf(format) {
  const base = format.split("+")[0];
  return base === "raw" ? 16 : Number(base.split(":")[1]) || 0;
}

export function colourOf(format) {
  if (format === RUNNING) return "var(--live)";
  const bits = bitsOf(format);
  return bits === 16 ? "var(--raw)" : [2, 3, 4, 5, 6, 8].includes(bits) ? `var(--b${bits})` : "var(--other)";
}

export function fewestBitsFirst(formats) {
  const rank = (format) => (format === RUNNING ? 99 : bitsOf(format));
  return [...formats].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
}

export function swatch(format) {
  const element = h("span", { class: "swatch" });
  element.style.background = colourOf(format);
  return element;
}

// The upper half of a bar shows the format of keys, the lower half that of values.
export function keyValueHalves({ k, v }) {
  return [k, v].map((format) => {
    const half = h("i");
    half.style.background = colourOf(format || OTHER);
    return half;
  });
}

export const precisionName = ({ k, v }) => (k === v ? k || "unknown precision" : `${k} / ${v}`);

export class PrecisionForm {
  constructor(onError) {
    this.onError = onError;
    this.form = byId("precision");
    this.result = byId("precision-result");
    this.apply = byId("apply");
    this.dryRun = null; // {request, answer} of the last dry run; null once the form has changed
    this.hasDefaults = false;
    for (const select of [this.form.k, this.form.v]) select.append(...FORMATS.map((format) => h("option", {}, format)));
    this.form.addEventListener("change", () => this.invalidateDryRun());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(true);
    });
    this.apply.addEventListener("click", () => this.confirmAndApply());
    byId("cancel").addEventListener("click", () => this.cancel());
  }

  showTarget(usage) {
    const { k, v } = usage.target;
    byId("target").textContent = `new KV: K ${k}, V ${v}`;
    if (this.hasDefaults) return;
    for (const [select, format] of [[this.form.k, k], [this.form.v, v]]) {
      if (![...select.options].some((option) => option.value === format)) select.append(h("option", {}, format));
      select.value = format;
    }
    const disk = this.form.scope.querySelector("[value=disk]");
    disk.hidden = disk.disabled = !("disk" in usage.tiers);
    this.hasDefaults = true;
  }

  readRequest() {
    const { k, v, scope, force } = this.form;
    return { k: k.value, v: v.value, scope: scope.value, force: force.checked };
  }

  invalidateDryRun() {
    this.dryRun = null;
    this.apply.disabled = true;
  }

  // Dropped bits do not come back by themselves, so the user is asked before bits are dropped.
  async confirmAndApply() {
    const { request, answer } = this.dryRun;
    const { bytes_before: before, bytes_after: after, target, expected_error: error, spans } = answer;
    const lines = () => [
      `${plural(spans, "span")} ${spans === 1 ? "is" : "are"} transcoded to K ${target.k}, V ${target.v}: ${formatBytes(before)} become ${formatBytes(after)}, ${formatBytes(before - after)} less.`,
      `Expected error of attention scores: ${formatPercent(error, 1)}.`,
      "Dropped bits come back only from a copy on the disk, or when prompts are computed again.",
    ];
    if (after < before && !(await confirmed({ title: "Reduce the precision?", action: "Apply", lines }))) return;
    await this.send(false, request);
  }

  async send(isDryRun, request = this.readRequest()) {
    const focused = document.activeElement;
    this.form.dry.disabled = this.apply.disabled = true;
    try {
      const answer = await post("/cache/requantize", { ...request, dry_run: isDryRun });
      this.dryRun = isDryRun ? { request, answer } : null;
      this.showResult(answer);
      if (!isDryRun) this.followProgress();
    } catch (error) {
      this.result.replaceChildren(h("p", { class: "error" }, error.message));
      this.onError(error);
    } finally {
      this.form.dry.disabled = false;
      // The form may have changed since the request was sent.
      this.apply.disabled = JSON.stringify(this.dryRun?.request) !== JSON.stringify(this.readRequest());
      // A disabled button loses the focus; restore it for keyboard users.
      if (focused === this.form.dry || focused === this.apply) (focused.disabled ? this.form.dry : focused).focus();
    }
  }

  showResult(answer) {
    const { bytes_before: before, bytes_after: after } = answer;
    const freed = before - after;
    const noChange = answer.spans === 0 && (answer.note || (answer.dry_run ? "Nothing would change" : "Nothing changes"));
    const verb = answer.dry_run ? (freed < 0 ? "would take" : "would free") : freed < 0 ? "takes" : "frees";
    const unchanged = answer.left_alone.map((it) => {
      const things = plural(it.spans, it.tier === "disk" ? "block" : "span");
      return h("li", {}, `${it.reason}: ${things}, ${formatBytes(it.bytes)}`);
    });
    this.result.replaceChildren(
      h("p", { class: "headline" }, noChange || `${answer.dry_run ? "Dry run: " : ""}${verb} ${formatBytes(Math.abs(freed))} (${formatPercent(Math.abs(freed), before)})`),
      meter("div", "bar", before ? after / before : 0),
      h(
        "dl",
        {},
        ...row("K, V", `${answer.target.k}, ${answer.target.v}`),
        ...Object.entries(answer.tiers).flatMap(([tier, change]) => row(tierName(tier), describeChange(change))),
        ...row("spans that change", formatCount(answer.spans)),
        ...row("expected score error", formatPercent(answer.expected_error, 1)),
      ),
      ...(unchanged.length ? [h("p", { class: "hint" }, "Unchanged:"), h("ul", {}, ...unchanged)] : []),
    );
  }

  async followProgress() {
    const box = byId("progress");
    for (;;) {
      const progress = await get("/cache/requantize").catch(() => ({ is_running: false }));
      box.hidden = !progress.is_running;
      if (!progress.is_running) return;
      box.querySelector("progress").value = progress.spans_done / Math.max(1, progress.spans_total);
      box.querySelector("span").textContent = `${formatCount(progress.spans_done)} of ${formatCount(progress.spans_total)} spans`;
      await new Promise((resolve) => setTimeout(resolve, PROGRESS_MS));
    }
  }

  async cancel() {
    await remove("/cache/requantize").catch(this.onError);
  }
}

function describeChange({ bytes_before: before, bytes_after: after, bytes_freed: freed }) {
  const change = freed === 0 ? "unchanged" : `${formatBytes(Math.abs(freed))} ${freed < 0 ? "more" : "less"}`;
  return `${formatBytes(before)} → ${formatBytes(after)}, ${change}`;
}

const row = (term, value) => [h("dt", {}, term), h("dd", {}, value)];
