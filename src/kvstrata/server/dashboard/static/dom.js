// Elements, formatted numbers, and the confirmation dialog. Text is added as text nodes only: nothing from the server is
// parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export const byId = (id) => document.getElementById(id);

export function h(tag, attributes = {}, ...children) {
  return setUp(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return setUp(document.createElementNS(SVG, tag), attributes, children);
}

function setUp(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// A bar that is filled from the left; `share`: 0 to 1. Its number stands beside it, so screen readers skip it.
export function meter(tag, className, share) {
  const fill = h("i");
  fill.style.width = `${Math.min(100, 100 * share)}%`;
  return h(tag, { class: className, "aria-hidden": "true" }, fill);
}

// [number, unit], so that the unit can be set smaller.
export function bytesAndUnit(bytes) {
  let value = bytes;
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return [unit === 0 ? String(Math.round(value)) : value.toFixed(Math.abs(value) < 100 ? 1 : 0), UNITS[unit]];
}

export const formatBytes = (bytes) => bytesAndUnit(bytes).join("\u00a0");
export const formatCount = (number) => Math.round(number).toLocaleString("en-US");
export const formatPercent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)}\u00a0%` : "–");
export const formatClock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");
export const plural = (number, noun) => `${formatCount(number)} ${noun}${Math.round(number) === 1 ? "" : "s"}`;
export const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

// Time since an event, in the largest unit that fits.
export function formatAge(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))}\u00a0s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)}\u00a0min ago`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)}\u00a0h ago` : `${Math.floor(seconds / 86400)}\u00a0days ago`;
}

export function formatDuration(seconds) {
  if (seconds < 0.1) return `${Math.max(1, Math.round(1000 * seconds))}\u00a0ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)}\u00a0s`;
  return seconds < 3600 ? `${Math.round(seconds / 60)}\u00a0min` : `${(seconds / 3600).toFixed(1)}\u00a0h`;
}

// Ask before data is lost. `lines(choice)` returns sentences about the cost. Resolves to the choice (true where there are
// none), or to null if the user cancels or another dialog is open.
export function confirmed({ title, action, lines, choices = [] }) {
  const dialog = byId("confirm");
  if (dialog.open) return Promise.resolve(null);
  const cost = byId("confirm-cost");
  const box = byId("confirm-choices");
  const showCost = (choice) => cost.replaceChildren(...lines(choice).map((line) => h("p", {}, line)));
  byId("confirm-title").textContent = title;
  byId("confirm-yes").textContent = action;
  const options = choices.map(([value, label], index) => h("label", {}, h("input", { type: "radio", name: "choice", value, checked: index === 0 }), h("span", {}, label)));
  box.replaceChildren(box.querySelector("legend"), ...options);
  box.hidden = choices.length < 2;
  box.onchange = (event) => showCost(event.target.value);
  showCost(choices[0]?.[0]);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    const chosen = () => (choices.length ? box.querySelector("input:checked").value : true);
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes" ? chosen() : null), { once: true });
  });
}
