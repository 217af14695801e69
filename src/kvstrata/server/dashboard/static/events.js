// Events: what rose between two looks at the counters, and what changed besides.

import { byId, count, h, size } from "./dom.js";

const MAX_EVENTS = 200;
// Every request moves these, or they rise and fall: figures, not events.
const QUIET = /^(queried|hit|disk_read|disk_queue|disk_limit|disk_missed|remote_read|remote_queue|remote_missed)_|^stored_tokens$|^remote_is_paused$|^(disk|remote)_written_(?!bytes)/;
const KINDS = [
  [/fail|damage|error|quarantin/, "failed"],
  [/^(disk_|remote_)?refused_/, "refused"],
  [/evict/, "evicted"],
  [/dropped/, "dropped"],
  [/spill|written/, "spilled"],
  [/promot|restor/, "loaded"],
  [/stepped/, "stepped down"],
  [/encoded/, "encoded"],
  [/stored/, "stored"],
];

export class Events {
  constructor() {
    this.counters = null;
    this.target = null;
    this.list = byId("events");
    this.list.append(h("li", { class: "empty" }, "Nothing has happened yet."));
  }

  update(usage) {
    if (this.counters !== null) {
      for (const [name, value] of Object.entries(usage.counters)) {
        const risen = value - (this.counters[name] ?? 0);
        if (risen > 0 && !QUIET.test(name)) this.add(kindOf(name), words(name, risen));
      }
    }
    this.counters = usage.counters;
    this.noteTarget(`K ${usage.target.k}, V ${usage.target.v}`);
  }

  noteTarget(target) {
    if (this.target !== null && this.target !== target) this.add("target", target);
    this.target = target;
  }

  add(kind, what) {
    this.list.querySelector(".empty")?.remove();
    const now = new Date();
    const time = h("time", { datetime: now.toISOString() }, now.toLocaleTimeString("en-GB"));
    const className = `kind ${kind.replace(" ", "-")}`;
    this.list.prepend(h("li", {}, time, h("span", { class: className }, kind), h("span", { class: "what" }, what)));
    while (this.list.children.length > MAX_EVENTS) this.list.lastChild.remove();
  }
}

const kindOf = (name) => KINDS.find(([pattern]) => pattern.test(name))?.[1] ?? "counted";

function words(name, risen) {
  // The kind has said it already.
  const said = name.replace(/^(refused|stored|encoded|stepped_down|evicted|spilled)_/, "").replace(/_bytes$/, "");
  return `${said.replaceAll("_", " ")} +${name.endsWith("_bytes") ? size(risen) : count(risen)}`;
}
