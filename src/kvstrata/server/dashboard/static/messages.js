// How one message of the chat is shown: what a person wrote as it is, a reply as Markdown with its thinking folded above
// it and its figures below.

import { count, h } from "./dom.js";
import { Markdown } from "./markdown.js";

export function question(text) {
  return h("li", { class: "message user" }, who("You"), h("div", { class: "said" }, text));
}

// A turn: {content, thinking, thoughtMs, figures, doing, stopped, error}.
export class Reply {
  constructor() {
    this.text = new Markdown();
    this.text.element.classList.add("said");
    this.thinking = new Markdown();
    this.summary = h("summary");
    this.folded = h("details", { class: "thinking", hidden: true }, this.summary, this.thinking.element);
    this.note = h("footer");
    this.element = h("li", { class: "message assistant" }, who("Model"), this.folded, this.text.element, this.note);
  }

  // While it comes. A screen reader waits until it is whole.
  grow(turn) {
    this.element.setAttribute("aria-busy", "true");
    this.thinking.show(turn.thinking, true);
    this.text.show(turn.content, true);
    this.aside(turn, true);
  }

  finish(turn) {
    this.element.removeAttribute("aria-busy");
    this.thinking.finish(turn.thinking);
    this.text.finish(turn.content);
    this.aside(turn, false);
  }

  aside(turn, isOpen) {
    this.folded.hidden = !turn.thinking;
    this.text.element.hidden = !turn.content && !(isOpen && !turn.thinking);
    this.element.classList.toggle("waits", isOpen && !turn.content && !turn.thinking);
    write(this.summary, thought(turn, isOpen));
    if (isOpen) write(this.note, turn.doing);
    else this.note.replaceChildren(...noted(turn));
  }
}

const who = (name) => h("span", { class: "hush" }, `${name}: `);

// The same text again would be read out again.
function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function thought(turn, isOpen) {
  if (isOpen && !turn.content) return "Thinking …";
  return turn.thoughtMs ? `Thought for ${seconds(turn.thoughtMs)}` : "Thinking";
}

function noted(turn) {
  if (turn.error) return [h("span", { class: "error" }, turn.error)];
  const { cached, prompt, why, firstMs, rate } = turn.figures;
  const parts = [];
  if (turn.stopped) parts.push("stopped");
  if (cached !== null) {
    const of = prompt === null ? count(cached) : `${count(cached)} of ${count(prompt)}`;
    parts.push([h("b", {}, of), ` prompt tokens cached${why ? ` (${why})` : ""}`]);
  }
  if (firstMs !== null) parts.push(`first token after ${seconds(firstMs)}`);
  else if (!turn.stopped) parts.push("no text");
  if (rate !== null) parts.push(`${rate.toFixed(1)} tokens/s`);
  return parts.flatMap((part, place) => (place ? [", ", part] : [part])).flat();
}

const seconds = (ms) => `${(ms / 1000).toFixed(2)}\u00a0s`;
