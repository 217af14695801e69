// Axes that several drawings share: round numbers, and times of the day that do not crowd each other.

import { s } from "./dom.js";

const STEPS_S = [15, 30, 60, 120, 300, 600, 900, 1800];
const TICK_PIXELS = 78;

// Labels below a drawing of the time from `begin` to `end`, in milliseconds.
export function timeTicks(begin, end, x, y) {
  const room = Math.max(1, Math.floor((x(end) - x(begin)) / TICK_PIXELS));
  const step = 1000 * (STEPS_S.find((seconds) => (end - begin) / (1000 * seconds) <= room) ?? 3600);
  const offset = 60000 * new Date(end).getTimezoneOffset();
  const ticks = [];
  for (let time = Math.ceil((begin - offset) / step) * step + offset; time <= end; time += step) {
    const label = new Date(time).toLocaleTimeString("en-GB", step < 60000 ? {} : { hour: "2-digit", minute: "2-digit" });
    const left = x(time);
    if (left - x(begin) < 14 || x(end) - left < 52) continue;
    ticks.push(s("text", { x: left, y, "text-anchor": "middle" }, label));
  }
  return [...ticks, s("text", { x: x(end), y, "text-anchor": "end" }, "now")];
}

// The next round number: 1, 2 or 5 times a power of the base's.
export function niceBytes(bytes) {
  const unit = 1024 ** Math.floor(Math.log(Math.max(1, bytes)) / Math.log(1024));
  return unit * ([1, 2, 5, 10, 20, 50, 100, 200, 500].find((step) => step * unit >= bytes) ?? 1024);
}

export function niceNumber(number) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(1e-6, number)));
  return unit * [1, 2, 5, 10].find((step) => step * unit >= number * 0.999999);
}
