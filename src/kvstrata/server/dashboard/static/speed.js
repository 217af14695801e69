// How fast it was: the time to the first token and tokens a second, over the same time as the strata.

import { niceNumber, timeTicks } from "./axes.js";
import { byId, h, s, took } from "./dom.js";

const LEFT = 62;
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 18;

export class Speed {
  constructor(history) {
    this.history = history;
    this.view = null; // {begin, now, cursor}
    this.first = new Plot("First token", "first-token");
    this.rate = new Plot("Tokens a second", "rate");
    byId("speeds").append(this.first.figure, this.rate.figure);
  }

  // As the strata do.
  show(view) {
    this.view = view;
    this.draw();
  }

  draw() {
    if (!this.view) return;
    const shown = this.history.slots.filter((slot) => slot.at >= this.view.begin && slot.at - this.history.slotMs <= this.view.now);
    const chosen = this.view.cursor === null ? null : shown.find((slot) => slot.at >= this.view.cursor);
    this.drawFirst(shown.filter((slot) => slot.first_token_p50_s !== null), chosen);
    this.drawRate(shown.filter((slot) => slot.tokens_per_s !== null), chosen);
  }

  drawFirst(slots, chosen) {
    const last = chosen ?? slots.at(-1);
    const said = last?.first_token_p50_s ? `${took(last.first_token_p50_s)}, 95 % within ${took(last.first_token_p95_s)}` : "–";
    const worst = Math.max(0, ...slots.map((slot) => slot.first_token_p95_s));
    const spoken = slots.length ? `First token over time: last ${said}; at worst ${took(worst)}` : "First token over time: no request yet";
    this.first.draw(this.view, worst, took, said, spoken, (x, y) =>
      slots.flatMap((slot) => {
        const at = x(slot.at - this.history.slotMs / 2);
        return [
          s("line", { class: "spread", x1: at, x2: at, y1: y(slot.first_token_p50_s), y2: y(slot.first_token_p95_s) }),
          s("circle", { class: "dot", cx: at, cy: y(slot.first_token_p50_s), r: 2.2 }),
        ];
      }),
    );
  }

  drawRate(slots, chosen) {
    const last = chosen ?? slots.at(-1);
    const words = (rate) => rate.toFixed(rate < 10 ? 1 : 0);
    const said = last?.tokens_per_s == null ? "–" : words(last.tokens_per_s);
    const most = Math.max(0, ...slots.map((slot) => slot.tokens_per_s));
    const spoken = `Tokens a second over time: last ${said}; at most ${words(most)}`;
    this.rate.draw(this.view, most, words, said, spoken, (x, y) => {
      if (!slots.length) return [];
      const steps = slots.flatMap((slot) => [slot.at - this.history.slotMs, slot.at].map((time) => `${x(time).toFixed(1)},${y(slot.tokens_per_s).toFixed(1)}`));
      const [from, to] = [x(slots[0].at - this.history.slotMs), x(slots.at(-1).at)];
      return [s("path", { class: "area", d: `M${from},${y(0)}L${steps.join("L")}L${to},${y(0)}Z` })];
    });
  }
}

class Plot {
  constructor(title, id) {
    this.value = h("b");
    this.svg = s("svg", { role: "img" });
    this.box = h("div", { class: "chart small", "data-plot": id }, this.svg);
    this.figure = h("figure", {}, h("figcaption", {}, `${title} `, this.value), this.box);
  }

  draw(view, most, words, said, spoken, marks) {
    const width = this.box.clientWidth;
    const height = this.box.clientHeight;
    const top = niceNumber(most || 1);
    const x = (time) => LEFT + ((Math.min(Math.max(time, view.begin), view.now) - view.begin) / (view.now - view.begin)) * (width - LEFT - RIGHT);
    const y = (value) => height - BOTTOM - (value / top) * (height - TOP - BOTTOM);
    const line = (value, className) => s("line", { class: className, x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) });
    const label = (value) => s("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, value ? words(value) : "0");
    const cursor = view.cursor === null ? [] : [s("line", { class: "cursor", x1: x(view.cursor), x2: x(view.cursor), y1: TOP, y2: height - BOTTOM })];
    this.value.textContent = said;
    this.svg.setAttribute("aria-label", spoken);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(line(top, "grid"), line(top / 2, "grid"), line(0, "zero"), label(top), label(0), ...timeTicks(view.begin, view.now, x, height - 3), ...marks(x, y), ...cursor);
  }
}
