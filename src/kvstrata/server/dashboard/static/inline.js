// Markdown inside a paragraph: code, emphasis, links, line breaks. Makes elements and text nodes, never HTML: what looks
// like a tag stays text, and a link leads to http, https or mailto or is no link. Time grows with the length of the text
// alone, whatever a model writes.

import { h } from "./dom.js";

const SPECIAL = /\\|`+|\*+|_+|~+|!?\[|\]|<|\bhttps?:\/\/|\n/g;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]*)>/y;
const BARE = /https?:\/\/[^\s<>"`]+/y;
// What follows the text of a link. A title is bounded, so that a quote that nobody closes costs little.
const TARGET = /\(\s*(?:<([^<>\n]*)>|([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*))(?:\s+(?:"[^"\n]{0,300}"|'[^'\n]{0,300}'))?\s*\)/y;
const SCHEMES = ["http:", "https:", "mailto:"];
const MAX_DEPTH = 20;
const EMPHASIS = { "*": ["em", "strong"], _: ["em", "strong"], "~": [null, "del"] };

// Nodes and strings. `isOpen`: more of it is coming, so what was begun at the end is taken as if it were closed there.
export function inline(text, isOpen = false) {
  return new Inline(text, isOpen).read();
}

export function safeLink(target) {
  try {
    const url = new URL(target);
    return SCHEMES.includes(url.protocol) ? url.href : null;
  } catch {
    return null; // also of a path: nothing that a model writes leads to this server
  }
}

export function wrap(tag, attributes, children) {
  const element = h(tag, attributes);
  for (const child of children) element.append(child);
  return element;
}

class Inline {
  constructor(text, isOpen) {
    this.text = text;
    this.isOpen = isOpen;
    this.at = 0;
    this.out = []; // strings and elements
    this.stack = []; // openers: {kind, place in out, length, firm}
    this.openers = { "*": 0, _: 0, "~": 0, "[": 0 };
    this.depths = new Map(); // of elements
    this.links = new Set(); // elements that hold a link
    this.ticks = null; // where runs of so many backticks are, made when it is asked for
    this.lastBreak = isOpen ? text.search(/[\s)][^\s)]*$/) : 0;
  }

  read() {
    const { text } = this;
    while (this.at < text.length) {
      SPECIAL.lastIndex = this.at;
      const found = SPECIAL.exec(text);
      const end = found ? found.index : text.length;
      this.say(text.slice(this.at, end));
      this.at = end;
      if (found) this.special(found[0]);
    }
    if (this.isOpen) this.closeAll();
    return this.out.filter((each) => each !== "");
  }

  say(piece) {
    if (piece) this.out.push(piece);
    this.at += piece.length;
  }

  special(mark) {
    const kind = mark[0];
    if (mark === "\n") this.lineBreak(1);
    else if (kind === "\\") this.escape();
    else if (kind === "`") this.code(mark);
    else if (kind in EMPHASIS) this.emphasis(kind, mark.length);
    else if (mark === "]") this.closeLink();
    else if (mark.endsWith("[")) this.open("[", mark);
    else if (kind === "<") this.autolink();
    else this.bareLink();
  }

  lineBreak(length) {
    this.out.push(h("br"));
    this.at += length;
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "\n") return this.lineBreak(2);
    if (next === undefined || !ESCAPABLE.test(next)) return this.say("\\");
    this.out.push(next);
    this.at += 2;
  }

  code(mark) {
    const begin = this.at + mark.length;
    const end = this.closingTicks(mark.length, begin);
    if (end === undefined && !this.isOpen) return this.say(mark);
    const inside = this.text.slice(begin, end).replaceAll("\n", " ");
    // Spaces at both ends are there to part backticks inside from those that mark it.
    const padded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim() !== "";
    if (inside) this.out.push(h("code", {}, padded ? inside.slice(1, -1) : inside));
    this.at = end === undefined ? this.text.length : end + mark.length;
  }

  closingTicks(length, from) {
    if (this.ticks === null) {
      this.ticks = new Map();
      for (const run of this.text.matchAll(/`+/g)) {
        if (!this.ticks.has(run[0].length)) this.ticks.set(run[0].length, []);
        this.ticks.get(run[0].length).push(run.index);
      }
      for (const places of this.ticks.values()) places.reverse();
    }
    const places = this.ticks.get(length) ?? [];
    while (places.length && places.at(-1) < from) places.pop();
    return places.at(-1);
  }

  open(kind, mark, firm = false) {
    this.stack.push({ kind, place: this.out.length, length: mark.length, firm });
    this.openers[kind] += 1;
    this.out.push(mark);
    this.at += mark.length;
  }

  // The last opener of this kind. What was opened after it stays text.
  opener(kind) {
    if (this.openers[kind] === 0) return null;
    for (;;) {
      const last = this.stack.pop();
      this.openers[last.kind] -= 1;
      if (last.kind === kind) return last;
    }
  }

  emphasis(kind, length) {
    const { text, at } = this;
    const before = text[at - 1] ?? " ";
    const after = text[at + length] ?? " ";
    const left = flanks(after, before);
    const right = flanks(before, after);
    const opens = left && (kind !== "_" || !right || isPunctuation(before));
    const closes = right && (kind !== "_" || !left || isPunctuation(after));
    const isLast = this.isOpen && at + length === text.length;
    // Half of a mark that closes: the other half comes.
    const isHalf = isLast && this.stack.findLast((opener) => opener.kind === kind)?.length > length;
    const rest = closes && !isHalf ? this.closeEmphasis(kind, length) : length;
    const mark = kind.repeat(rest);
    this.at = at + length - rest;
    if (!rest) return;
    if (opens && (kind !== "~" || rest > 1)) this.open(kind, mark, rest > 1 || !isWord(before));
    // At the end of what has come nobody knows yet what it means.
    else if (isLast) this.at = text.length;
    else this.say(mark);
  }

  closeEmphasis(kind, length) {
    let rest = length;
    while (rest > 0) {
      const opener = this.opener(kind);
      if (opener === null) return rest;
      const used = Math.min(2, rest, opener.length);
      const tag = EMPHASIS[kind][used - 1];
      if (tag === null || !this.wrapFrom(opener, tag)) return rest;
      rest -= used;
      opener.length -= used;
      this.out[opener.place] = kind.repeat(opener.length);
      if (opener.length) {
        this.stack.push(opener);
        this.openers[kind] += 1;
      }
    }
    return rest;
  }

  // What came after the opener becomes one element, unless that nests too deep for a browser.
  wrapFrom(opener, tag, attributes = {}) {
    const inside = this.out.slice(opener.place + 1);
    const depth = 1 + inside.reduce((most, each) => Math.max(most, this.depths.get(each) ?? 0), 0);
    if (depth > MAX_DEPTH) this.forgetOpeners();
    if (depth > MAX_DEPTH || inside.length === 0) return false;
    this.out.length = opener.place + 1;
    const element = wrap(tag, attributes, inside);
    this.depths.set(element, depth);
    if (tag === "a" || inside.some((each) => this.links.has(each))) this.links.add(element);
    this.out.push(element);
    return true;
  }

  forgetOpeners() {
    this.stack.length = 0;
    for (const kind of Object.keys(this.openers)) this.openers[kind] = 0;
  }

  closeLink() {
    TARGET.lastIndex = this.at + 1;
    const found = this.openers["["] && this.text[this.at + 1] === "(" ? TARGET.exec(this.text) : null;
    const href = found && safeLink(found[1] ?? found[2]);
    if (!href) return this.noLink();
    const opener = this.opener("[");
    if (this.out.slice(opener.place + 1).some((each) => this.links.has(each)) || !this.wrapFrom(opener, "a", outward(href))) {
      return this.say("]");
    }
    this.out[opener.place] = ""; // an image becomes a link: the page loads nothing from elsewhere
    this.at = TARGET.lastIndex;
  }

  noLink() {
    const { text, at } = this;
    if (this.isOpen && this.openers["["] && text[at + 1] === "(" && at > this.lastBreak) {
      // The text of the link stands already; its target comes.
      this.out[this.opener("[").place] = "";
      this.at = text.length;
      return;
    }
    if (this.stack.at(-1)?.kind === "[") this.opener("[");
    this.say("]");
  }

  autolink() {
    AUTOLINK.lastIndex = this.at;
    const found = AUTOLINK.exec(this.text);
    const href = found && safeLink(found[1]);
    if (!href) return this.say("<");
    this.link(href, found[1]);
    this.at += found[0].length;
  }

  bareLink() {
    BARE.lastIndex = this.at;
    const found = BARE.exec(this.text);
    const shown = found ? trimmed(found[0]) : "";
    const href = shown.length > "https://".length ? safeLink(shown) : null;
    if (!href || this.openers["["]) return this.say(this.text.slice(this.at, this.at + 4));
    this.link(href, shown);
    this.at += shown.length;
  }

  link(href, shown) {
    const element = h("a", outward(href), shown);
    this.links.add(element);
    this.depths.set(element, 1);
    this.out.push(element);
  }

  closeAll() {
    for (const opener of [...this.stack].reverse()) {
      const tag = opener.firm ? EMPHASIS[opener.kind]?.[Math.min(2, opener.length) - 1] : null;
      if (tag && this.wrapFrom(opener, tag)) this.out[opener.place] = opener.kind.repeat(Math.max(0, opener.length - 2));
    }
  }
}

const outward = (href) => ({ href, title: href, rel: "noopener noreferrer nofollow", target: "_blank" });
const isPunctuation = (character) => /[\p{P}\p{S}]/u.test(character);
// Languages that put no spaces between words would never see emphasis end before one.
const isWord = (character) => !/[\s\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}]/u.test(character) && !isPunctuation(character);
// Whether a mark touches `side` as its own text.
const flanks = (side, other) => !/\s/.test(side) && (!isPunctuation(side) || !isWord(other));

// A sentence's marks behind an address are not part of it; a bracket is, if it was opened there.
function trimmed(address) {
  const ends = address.includes("(") ? /[.,;:!?'*_~\]]/ : /[.,;:!?'*_~\])]/;
  let end = address.length;
  while (end > 0 && ends.test(address[end - 1])) end -= 1;
  return address.slice(0, end);
}
