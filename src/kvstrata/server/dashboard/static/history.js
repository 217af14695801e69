// What was held, once a second, for as long as this page is open and at most an hour.

import { sum } from "./dom.js";
import { OTHER, RUNNING } from "./precisions.js";

const MAX_SAMPLES = 3600;

export class History {
  constructor() {
    this.samples = []; // {time, memory: {name: bytes}, disk: {name: bytes}}, oldest first
  }

  add(usage, time) {
    const memory = byPrecision(usage.tiers.hot);
    if (usage.running_bytes) memory[RUNNING] = usage.running_bytes;
    const disk = usage.tiers.disk ? byPrecision(usage.tiers.disk) : {};
    this.samples.push({ time, memory, disk });
    if (this.samples.length > MAX_SAMPLES) this.samples.shift();
  }

  since(time) {
    // One older than asked for, so that the drawing reaches the edge.
    const first = this.samples.findIndex((sample) => sample.time >= time);
    return first < 0 ? this.samples.slice(-1) : this.samples.slice(Math.max(0, first - 1));
  }

  get last() {
    return this.samples[this.samples.length - 1];
  }
}

// What a tier takes besides planes (a catalogue, folders) is part of what it holds.
function byPrecision(tier) {
  const rest = tier.bytes - sum(Object.values(tier.by_precision));
  return rest > 0 ? { ...tier.by_precision, [OTHER]: rest } : { ...tier.by_precision };
}
