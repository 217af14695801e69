// Elements and numbers. Text goes in as text nodes only: nothing that the server says is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

// [number, unit], so that the unit can be set smaller.
export function sizeParts(bytes) {
  let value = bytes;
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return [unit === 0 ? String(Math.round(value)) : value.toFixed(Math.abs(value) < 100 ? 1 : 0), UNITS[unit]];
}

export const size = (bytes) => sizeParts(bytes).join("\u00a0");
export const count = (number) => Math.round(number).toLocaleString("en-US");
export const plural = (number, thing) => `${count(number)} ${thing}${Math.round(number) === 1 ? "" : "s"}`;
export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)}\u00a0%` : "–");
export const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

// How long ago, in the largest unit that fits.
export function passed(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))}\u00a0s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)}\u00a0min ago`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)}\u00a0h ago` : `${Math.floor(seconds / 86400)}\u00a0days ago`;
}

// A time that something took.
export function took(seconds) {
  if (seconds < 0.1) return `${Math.max(1, Math.round(1000 * seconds))}\u00a0ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)}\u00a0s`;
  return seconds < 3600 ? `${Math.round(seconds / 60)}\u00a0min` : `${(seconds / 3600).toFixed(1)}\u00a0h`;
}

export const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");
