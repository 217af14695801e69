// Markdown as DOM elements, for replies that are still being streamed. Three parts: blocks (paragraphs, headings, lists,
// quotes, tables, code), inline text, and the code block with its copy button.
//
// Text is added as text nodes only: HTML tags stay text, and a link has the scheme http, https or mailto or is no link. Blocks
// before the last one are not touched again while a reply grows. Time is linear in the length of the text.

import { h } from "./dom.js";

// Blocks, by their first line.
const FENCE = /^ *(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:([ \t]+)(?=\S)|[ \t]*$)/;
const DELIMITER_CELL = /^:?-+:?$/;
const MAX_BLOCK_DEPTH = 12;
const TOP_HEADING = 3; // the page itself uses h1 and h2
const COPIED_MS = 1500;

// Inline text.
const SPECIAL = /\\|`+|\*+|_+|~+|!?\[|\]|<|\bhttps?:\/\/|\n/g;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const AUTOLINK = /<((?:https?:\/\/|mailto:)[^\s<>]*)>/y;
const BARE_LINK = /https?:\/\/[^\s<>"`]+/y;
// Destination and title after the text of a link. The length of a title is bounded to keep the time linear.
const DESTINATION = /\(\s*(?:<([^<>\n]*)>|([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)*))(?:\s+(?:"[^"\n]{0,300}"|'[^'\n]{0,300}'))?\s*\)/y;
const SCHEMES = ["http:", "https:", "mailto:"];
const MAX_INLINE_DEPTH = 20;
const EMPHASIS = { "*": ["em", "strong"], _: ["em", "strong"], "~": [null, "del"] };

// Markdown that may grow: `show` is called with the whole text so far and keeps the elements of unchanged blocks.
export class Markdown {
  constructor() {
    this.element = h("div", { class: "markdown" });
    this.restart();
  }

  restart() {
    this.text = "";
    this.lastBlockStart = 0; // its offset in the text
    this.lastBlock = null;
    this.element.replaceChildren();
  }

  show(text, isOpen = false) {
    if (!text.startsWith(this.text)) this.restart();
    this.text = text;
    const lines = text.slice(this.lastBlockStart).split("\n");
    const found = parseBlocks(lines, isOpen);
    if (found.length === 0) return;
    const rest = this.extendCode(found[0]) ? found.slice(1) : found;
    if (rest === found) this.lastBlock?.element.remove();
    for (const block of rest) this.appendBlock(block);
    // Only the last block can still change.
    this.lastBlockStart += lines.slice(0, found.at(-1).line).join("\n").length + (found.at(-1).line ? 1 : 0);
  }

  // Show the complete text. Elements that were guessed wrong while it grew are replaced.
  finish(text) {
    this.show(text);
    const whole = new Markdown();
    whole.show(text);
    if (!whole.element.isEqualNode(this.element)) this.element.replaceChildren(...whole.element.childNodes);
  }

  appendBlock(block) {
    const code = block.kind === "code" ? makeCodeBlock(block) : null;
    this.lastBlock = { element: code?.element ?? blockElement(block), code };
    this.element.append(this.lastBlock.element);
  }

  // Append to the last code block instead of replacing it. Returns whether the block is its continuation.
  extendCode(block) {
    const code = this.lastBlock?.code;
    if (!code || block.kind !== "code" || block.language !== code.language) return false;
    code.show(block.text);
    return true;
  }
}

// [{kind, line, ...}], where `line` is the block's first line. `isOpen`: the last line may not be complete.
function parseBlocks(lines, isOpen, depth = 0) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const block = depth < MAX_BLOCK_DEPTH ? blockAt(lines, at, isOpen, depth) : paragraph(lines, at, isOpen, () => false);
    found.push({ ...block, line: at });
    at = block.end;
  }
  return found;
}

function blockAt(lines, at, isOpen, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return codeBlock(lines, at, isOpen);
  if (HEADING.test(line)) return heading(lines, at, isOpen);
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (QUOTE.test(line)) return quote(lines, at, isOpen, depth);
  if (ITEM.test(line)) return list(lines, at, isOpen, depth);
  if (isTable(lines, at, isOpen)) return table(lines, at, isOpen);
  return paragraph(lines, at, isOpen, interrupts);
}

// Whether a line ends the paragraph before it. An empty list item does not; neither does a number other than 1, which may be
// part of a sentence.
function interrupts(lines, at, isOpen) {
  const line = lines[at];
  const item = ITEM.exec(line);
  if (item && item[3] && !/^(?!1[.)])\d/.test(item[2])) return true;
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || isTable(lines, at, isOpen);
}

function paragraph(lines, at, isOpen, isEnd) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !isEnd(lines, end, isOpen)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return { kind: "paragraph", text, isOpen: isOpen && end === lines.length, end };
}

function heading(lines, at, isOpen) {
  const [prefix, signs] = HEADING.exec(lines[at]);
  const text = lines[at].slice(prefix.length).trim().replace(/(?:^|[ \t])#+$/, "").trim();
  return { kind: "heading", level: signs.length, text, isOpen: isOpen && at + 1 === lines.length, end: at + 1 };
}

function codeBlock(lines, at, isOpen) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const indent = indentOf(lines[at]);
  let end = at + 1;
  while (end < lines.length && !closesFence(lines[end], fence)) end += 1;
  const inside = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line))));
  // An empty last line, and one that may become the closing fence, are held back.
  const isHeldBack = isOpen ? /^(?:`+|~+|)$/ : /^$/;
  if (end === lines.length && inside.length && isHeldBack.test(inside.at(-1))) inside.pop();
  return { kind: "code", language: language.trim().split(/\s/)[0], text: inside.join("\n"), end: Math.min(lines.length, end + 1) };
}

function closesFence(line, fence) {
  const found = FENCE.exec(line);
  return found !== null && !found[2].trim() && found[1][0] === fence[0] && found[1].length >= fence.length;
}

function quote(lines, at, isOpen, depth) {
  let end = at;
  while (end < lines.length && (QUOTE.test(lines[end]) || (lines[end].trim() && !interrupts(lines, end, isOpen)))) end += 1;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { kind: "quote", blocks: parseBlocks(inside, isOpen && end === lines.length, depth + 1), end };
}

function list(lines, at, isOpen, depth) {
  const first = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(first[2]);
  const base = first[1].length;
  const items = [];
  let end = at;
  let isLoose = false;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    if (!found || RULE.test(lines[end]) || /\d/.test(found[2]) !== isOrdered || found[1].length >= base + 2) break;
    const item = itemAt(lines, end, found, base);
    const isLast = item.end === lines.length;
    items.push(parseBlocks(item.lines, isOpen && isLast, depth + 1));
    isLoose ||= item.isLoose || (item.blankAfter && !isLast && ITEM.test(lines[item.end]));
    end = item.end;
  }
  return { kind: "list", start: isOrdered ? parseInt(first[2], 10) : null, isLoose, items, end };
}

// The lines of one list item without their indent and without blank lines at its end.
function itemAt(lines, at, found, base) {
  const indent = found[3] && found[3].length <= 4 ? found[0].length : found[1].length + found[2].length + 1;
  const own = [lines[at].slice(indent)];
  let fence = FENCE.exec(own[0])?.[1] ?? null;
  let end = at + 1;
  let blanks = 0;
  let isLoose = false;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const inside = line.slice(Math.min(indent, indentOf(line)));
    if (fence === null) {
      if (!line.trim()) {
        blanks += 1;
        continue;
      }
      // Two spaces are enough, because models indent inconsistently.
      const isOwn = indentOf(line) >= Math.min(indent, base + 2);
      const isLazy = blanks === 0 && !ITEM.test(line) && !interrupts(lines, end, false);
      if (!isOwn && !isLazy) break;
    }
    isLoose ||= blanks > 0 && !ITEM.test(inside);
    for (; blanks > 0; blanks -= 1) own.push("");
    own.push(inside);
    if (fence !== null) fence = closesFence(inside, fence) ? null : fence;
    else fence = FENCE.exec(inside)?.[1] ?? null;
  }
  return { lines: own, end, isLoose, blankAfter: blanks > 0 };
}

// A header row with a delimiter row below it. In a text that grows, a row that begins with a bar is taken for a header.
function isTable(lines, at, isOpen) {
  if (!lines[at].includes("|")) return false;
  const isEnd = isOpen && at + 2 >= lines.length;
  const next = lines[at + 1] ?? "";
  if (isEnd && lines[at].trim().startsWith("|") && /^[ |:-]*$/.test(next)) return true;
  if (!next.includes("-")) return false;
  const delimiters = cells(next);
  return delimiters.every((cell) => DELIMITER_CELL.test(cell)) && delimiters.length === cells(lines[at]).length;
}

function table(lines, at, isOpen) {
  const align = cells(lines[at + 1] ?? "").map(alignment);
  const head = cells(lines[at]);
  let end = Math.min(lines.length, at + 2);
  const rows = [];
  while (end < lines.length && lines[end].trim() && (lines[end].includes("|") || !interrupts(lines, end, isOpen))) {
    rows.push(cells(lines[end]).slice(0, head.length));
    end += 1;
  }
  return { kind: "table", align, head, rows, isOpen: isOpen && end === lines.length, end };
}

function cells(line) {
  const inside = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inside.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function alignment(dashes) {
  const [left, right] = [dashes.startsWith(":"), dashes.endsWith(":")];
  return right ? (left ? "at-centre" : "at-right") : null;
}

const indentOf = (line) => line.length - line.trimStart().length;

function makeCodeBlock(block) {
  const code = new CodeBlock(block.language);
  code.show(block.text);
  return code;
}

function blockElement(block) {
  if (block.kind === "code") return makeCodeBlock(block).element;
  if (block.kind === "rule") return h("hr");
  if (block.kind === "quote") return wrap("blockquote", {}, block.blocks.map(blockElement));
  if (block.kind === "list") return listElement(block);
  if (block.kind === "table") return tableElement(block);
  const tag = block.kind === "heading" ? `h${Math.min(6, block.level + TOP_HEADING - 1)}` : "p";
  return wrap(tag, {}, parseInline(block.text, block.isOpen));
}

function listElement({ start, isLoose, items }) {
  const isBare = (block) => !isLoose && block.kind === "paragraph";
  const inside = (item) => item.flatMap((block) => (isBare(block) ? parseInline(block.text, block.isOpen) : [blockElement(block)]));
  const attributes = start === null || start === 1 ? {} : { start: String(start) };
  return wrap(start === null ? "ul" : "ol", attributes, items.map((item) => wrap("li", {}, inside(item))));
}

function tableElement({ align, head, rows, isOpen }) {
  const cell = (tag, text, column, isLast) => wrap(tag, { class: align[column] ?? null }, parseInline(text, isOpen && isLast));
  const row = (tag, texts, isLast) => wrap("tr", {}, texts.map((text, column) => cell(tag, text, column, isLast)));
  const body = wrap("tbody", {}, rows.map((texts, index) => row("td", texts, index === rows.length - 1)));
  const element = h("table", {}, h("thead", {}, row("th", head, rows.length === 0)), body);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, element);
}

// Elements and strings. `isOpen`: the text may continue, so constructs that are open at its end are taken as closed there.
function parseInline(text, isOpen = false) {
  return new InlineParser(text, isOpen).parse();
}

function safeLink(target) {
  try {
    const url = new URL(target);
    return SCHEMES.includes(url.protocol) ? url.href : null;
  } catch {
    return null; // also for relative paths, which would lead to this server
  }
}

function wrap(tag, attributes, children) {
  const element = h(tag, attributes);
  for (const child of children) element.append(child);
  return element;
}

class InlineParser {
  constructor(text, isOpen) {
    this.text = text;
    this.isOpen = isOpen;
    this.at = 0;
    this.out = []; // strings and elements
    this.stack = []; // open delimiters: {kind, index in `out`, length, isCertain}
    this.numOpen = { "*": 0, _: 0, "~": 0, "[": 0 };
    this.depths = new Map(); // element -> nesting
    this.links = new Set(); // elements that contain a link
    this.backticks = null; // length of a run -> its positions, last first; made on first use
    this.lastBreak = isOpen ? text.search(/[\s)][^\s)]*$/) : 0;
  }

  parse() {
    const { text } = this;
    while (this.at < text.length) {
      SPECIAL.lastIndex = this.at;
      const found = SPECIAL.exec(text);
      const end = found ? found.index : text.length;
      this.addText(text.slice(this.at, end));
      this.at = end;
      if (found) this.parseSpecial(found[0]);
    }
    if (this.isOpen) this.closeAll();
    return this.out.filter((each) => each !== "");
  }

  addText(text) {
    if (text) this.out.push(text);
    this.at += text.length;
  }

  parseSpecial(mark) {
    const kind = mark[0];
    if (mark === "\n") this.addLineBreak(1);
    else if (kind === "\\") this.parseEscape();
    else if (kind === "`") this.parseCode(mark);
    else if (kind in EMPHASIS) this.parseEmphasis(kind, mark.length);
    else if (mark === "]") this.closeLink();
    else if (mark.endsWith("[")) this.pushOpener("[", mark);
    else if (kind === "<") this.parseAutolink();
    else this.parseBareLink();
  }

  addLineBreak(length) {
    this.out.push(h("br"));
    this.at += length;
  }

  parseEscape() {
    const next = this.text[this.at + 1];
    if (next === "\n") return this.addLineBreak(2);
    if (next === undefined || !ESCAPABLE.test(next)) return this.addText("\\");
    this.out.push(next);
    this.at += 2;
  }

  parseCode(mark) {
    const begin = this.at + mark.length;
    const end = this.closingBackticks(mark.length, begin);
    if (end === undefined && !this.isOpen) return this.addText(mark);
    const inside = this.text.slice(begin, end).replaceAll("\n", " ");
    // Spaces at both ends separate backticks inside the code from its delimiters.
    const isPadded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim() !== "";
    if (inside) this.out.push(h("code", {}, isPadded ? inside.slice(1, -1) : inside));
    this.at = end === undefined ? this.text.length : end + mark.length;
  }

  closingBackticks(length, from) {
    if (this.backticks === null) {
      this.backticks = new Map();
      for (const run of this.text.matchAll(/`+/g)) {
        if (!this.backticks.has(run[0].length)) this.backticks.set(run[0].length, []);
        this.backticks.get(run[0].length).push(run.index);
      }
      for (const positions of this.backticks.values()) positions.reverse();
    }
    const positions = this.backticks.get(length) ?? [];
    while (positions.length && positions.at(-1) < from) positions.pop();
    return positions.at(-1);
  }

  pushOpener(kind, mark, isCertain = false) {
    this.stack.push({ kind, index: this.out.length, length: mark.length, isCertain });
    this.numOpen[kind] += 1;
    this.out.push(mark);
    this.at += mark.length;
  }

  // The last opener of this kind. Delimiters opened after it stay text.
  popOpener(kind) {
    if (this.numOpen[kind] === 0) return null;
    for (;;) {
      const last = this.stack.pop();
      this.numOpen[last.kind] -= 1;
      if (last.kind === kind) return last;
    }
  }

  parseEmphasis(kind, length) {
    const { text, at } = this;
    const before = text[at - 1] ?? " ";
    const after = text[at + length] ?? " ";
    const left = flanks(after, before);
    const right = flanks(before, after);
    const opens = left && (kind !== "_" || !right || isPunctuation(before));
    const closes = right && (kind !== "_" || !left || isPunctuation(after));
    const isLast = this.isOpen && at + length === text.length;
    // The first half of a closing delimiter.
    const isHalf = isLast && this.stack.findLast((opener) => opener.kind === kind)?.length > length;
    const rest = closes && !isHalf ? this.closeEmphasis(kind, length) : length;
    const mark = kind.repeat(rest);
    this.at = at + length - rest;
    if (!rest) return;
    if (opens && (kind !== "~" || rest > 1)) this.pushOpener(kind, mark, rest > 1 || !isWord(before));
    // The meaning of a delimiter at the end of an open text depends on the next character.
    else if (isLast) this.at = text.length;
    else this.addText(mark);
  }

  closeEmphasis(kind, length) {
    let rest = length;
    while (rest > 0) {
      const opener = this.popOpener(kind);
      if (opener === null) return rest;
      const used = Math.min(2, rest, opener.length);
      const tag = EMPHASIS[kind][used - 1];
      if (tag === null || !this.wrapFrom(opener, tag)) return rest;
      rest -= used;
      opener.length -= used;
      this.out[opener.index] = kind.repeat(opener.length);
      if (opener.length) {
        this.stack.push(opener);
        this.numOpen[kind] += 1;
      }
    }
    return rest;
  }

  // Move everything after the opener into one element, unless elements would nest too deep for a browser.
  wrapFrom(opener, tag, attributes = {}) {
    const inside = this.out.slice(opener.index + 1);
    const depth = 1 + inside.reduce((most, each) => Math.max(most, this.depths.get(each) ?? 0), 0);
    if (depth > MAX_INLINE_DEPTH) this.dropOpeners();
    if (depth > MAX_INLINE_DEPTH || inside.length === 0) return false;
    this.out.length = opener.index + 1;
    const element = wrap(tag, attributes, inside);
    this.depths.set(element, depth);
    if (tag === "a" || inside.some((each) => this.links.has(each))) this.links.add(element);
    this.out.push(element);
    return true;
  }

  dropOpeners() {
    this.stack.length = 0;
    for (const kind of Object.keys(this.numOpen)) this.numOpen[kind] = 0;
  }

  closeLink() {
    DESTINATION.lastIndex = this.at + 1;
    const found = this.numOpen["["] && this.text[this.at + 1] === "(" ? DESTINATION.exec(this.text) : null;
    const href = found && safeLink(found[1] ?? found[2]);
    if (!href) return this.keepBracket();
    const opener = this.popOpener("[");
    if (this.out.slice(opener.index + 1).some((each) => this.links.has(each)) || !this.wrapFrom(opener, "a", linkAttributes(href))) {
      return this.addText("]");
    }
    this.out[opener.index] = ""; // an image becomes a link: the page loads nothing from other servers
    this.at = DESTINATION.lastIndex;
  }

  keepBracket() {
    const { text, at } = this;
    if (this.isOpen && this.numOpen["["] && text[at + 1] === "(" && at > this.lastBreak) {
      // The text of the link is complete, its destination is not.
      this.out[this.popOpener("[").index] = "";
      this.at = text.length;
      return;
    }
    if (this.stack.at(-1)?.kind === "[") this.popOpener("[");
    this.addText("]");
  }

  parseAutolink() {
    AUTOLINK.lastIndex = this.at;
    const found = AUTOLINK.exec(this.text);
    const href = found && safeLink(found[1]);
    if (!href) return this.addText("<");
    this.addLink(href, found[1]);
    this.at += found[0].length;
  }

  parseBareLink() {
    BARE_LINK.lastIndex = this.at;
    const found = BARE_LINK.exec(this.text);
    const shown = found ? trimAddress(found[0]) : "";
    const href = shown.length > "https://".length ? safeLink(shown) : null;
    if (!href || this.numOpen["["]) return this.addText(this.text.slice(this.at, this.at + 4));
    this.addLink(href, shown);
    this.at += shown.length;
  }

  addLink(href, shown) {
    const element = h("a", linkAttributes(href), shown);
    this.links.add(element);
    this.depths.set(element, 1);
    this.out.push(element);
  }

  closeAll() {
    for (const opener of [...this.stack].reverse()) {
      const tag = opener.isCertain ? EMPHASIS[opener.kind]?.[Math.min(2, opener.length) - 1] : null;
      if (tag && this.wrapFrom(opener, tag)) this.out[opener.index] = opener.kind.repeat(Math.max(0, opener.length - 2));
    }
  }
}

const linkAttributes = (href) => ({ href, title: href, rel: "noopener noreferrer nofollow", target: "_blank" });
const isPunctuation = (character) => /[\p{P}\p{S}]/u.test(character);
// Chinese and Japanese put no spaces between words, so emphasis may end before their characters.
const isWord = (character) => !/[\s\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}]/u.test(character) && !isPunctuation(character);
// Whether a delimiter between `side` and `other` belongs to the text on its `side`.
const flanks = (side, other) => !/\s/.test(side) && (!isPunctuation(side) || !isWord(other));

// An address without the punctuation of the sentence around it. A closing bracket is kept where the address opens one.
function trimAddress(address) {
  const ends = address.includes("(") ? /[.,;:!?'*_~\]]/ : /[.,;:!?'*_~\])]/;
  let end = address.length;
  while (end > 0 && ends.test(address[end - 1])) end -= 1;
  return address.slice(0, end);
}

// A block of code with a copy button. Text is appended to its text node, so a selection stays.
class CodeBlock {
  constructor(language) {
    this.language = language;
    this.text = document.createTextNode("");
    this.button = h("button", { type: "button", class: "link copy" }, "Copy");
    this.button.addEventListener("click", () => this.copy());
    const code = h("code", {}, this.text);
    const label = language ? `Code, ${language}` : "Code";
    // Focusable, so that the keyboard can scroll wide code.
    this.pre = h("pre", { tabindex: "0", role: "region", "aria-label": label }, code);
    this.element = h("figure", { class: "code" }, h("figcaption", {}, h("span", {}, language), this.button), this.pre);
  }

  show(text) {
    const current = this.text.data;
    if (text.startsWith(current)) this.text.appendData(text.slice(current.length));
    else this.text.data = text;
  }

  async copy() {
    const isCopied = await copyText(this.text.data, this.pre);
    this.button.textContent = isCopied ? "Copied" : "Selected";
    setTimeout(() => (this.button.textContent = "Copy"), COPIED_MS);
  }
}

// Only pages from https or from this machine may use the clipboard API. Elsewhere the code is selected and the browser's older
// command is tried.
async function copyText(text, element) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    return document.execCommand("copy");
  }
}
