// An hour of what the server kept, and what this page saw since it was opened: figures, requests and events.
//
// The server's figures come in slots of some seconds and are of all keys; what the page sees itself comes once a second,
// and is left out where a key sees only its own.

import { sum } from "./dom.js";
import { OTHER, RUNNING } from "./precisions.js";

const KEPT_MS = 3600e3;
const MAX_POINTS = 600; // in one drawing
const MAX_REQUESTS = 500; // as the server keeps

export class History {
  constructor() {
    this.slots = []; // as the server told, oldest first, with `at` in this machine's time
    this.live = []; // {time, memory: {name: bytes}, disk: {name: bytes}}, oldest first
    this.requests = []; // newest first
    this.events = []; // newest first
    this.now = null; // the server's time when it was last asked
    this.slotMs = 10000;
  }

  // What GET /cache/history answered. Tells whether there are new requests or events.
  take(answer) {
    const offset = Date.now() - 1000 * answer.now;
    this.now = answer.now;
    this.slotMs = 1000 * answer.slot_s;
    const told = new Map([...this.slots, ...answer.slots].map((slot) => [slot.time, slot]));
    const oldest = answer.now - KEPT_MS / 1000;
    this.slots = [...told.values()].filter((slot) => slot.time > oldest).sort((a, b) => a.time - b.time);
    for (const slot of answer.slots) slot.at = 1000 * slot.time + offset + this.slotMs;
    const known = new Set(this.requests.map(nameOf));
    const requests = answer.requests.filter((request) => !known.has(nameOf(request)));
    this.requests = [...requests.reverse(), ...this.requests].slice(0, MAX_REQUESTS);
    this.events = [...answer.events].reverse().concat(this.events).filter((event) => event.time > oldest);
    return requests.length > 0 || answer.events.length > 0;
  }

  // One look at /cache/usage. What one key holds does not go on from what all of them held.
  add(usage, time) {
    if (usage.under !== "all") return;
    const memory = byPrecision(usage.tiers.hot);
    if (usage.running_bytes) memory[RUNNING] = usage.running_bytes;
    this.live.push({ time, memory, disk: usage.tiers.disk ? byPrecision(usage.tiers.disk) : {} });
    while (this.live[0].time < time - KEPT_MS) this.live.shift();
  }

  // What was held, not finer than can be drawn.
  since(begin, end) {
    const first = this.live[0]?.time ?? Infinity;
    const kept = this.slots.filter((slot) => slot.tiers && slot.at < first).map(sampleOf);
    const stride = (end - begin) / MAX_POINTS;
    const thin = this.live.filter((sample, place, all) => place === all.length - 1 || Math.floor(sample.time / stride) !== Math.floor(all[place + 1].time / stride));
    const samples = [...kept, ...thin];
    // One older than asked for, so that the drawing reaches the edge.
    const at = samples.findIndex((sample) => sample.time >= begin);
    return at < 0 ? samples.slice(-1) : samples.slice(Math.max(0, at - 1));
  }

  get last() {
    return this.live[this.live.length - 1]?.time ?? this.slots.findLast((slot) => slot.tiers)?.at;
  }

  get first() {
    return this.slots.find((slot) => slot.tiers)?.at ?? this.live[0]?.time;
  }
}

const nameOf = (request) => `${request.time} ${request.id}`;

function sampleOf(slot) {
  const memory = byPrecision(slot.tiers.hot);
  if (slot.running_bytes) memory[RUNNING] = slot.running_bytes;
  return { time: slot.at, memory, disk: slot.tiers.disk ? byPrecision(slot.tiers.disk) : {} };
}

// What a tier takes besides planes (a catalogue, folders) is part of what it holds.
function byPrecision(tier) {
  const rest = tier.bytes - sum(Object.values(tier.by_precision));
  return rest > 0 ? { ...tier.by_precision, [OTHER]: rest } : { ...tier.by_precision };
}
