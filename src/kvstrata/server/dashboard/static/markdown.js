// Markdown as elements: paragraphs, headings, lists, quotes, tables, rules, blocks of code. Knows lines; what is inside a
// paragraph is inline.js. No text becomes HTML. What is settled is never touched again while a reply grows.

import { Code } from "./code.js";
import { h } from "./dom.js";
import { inline, wrap } from "./inline.js";

const FENCE = /^ *(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:([ \t]+)(?=\S)|[ \t]*$)/;
const ALIGNED = /^:?-+:?$/;
const MAX_DEPTH = 12;
const TOP_HEADING = 3; // the page has the first two

// A text that may grow. `show` may be called with each piece; what was shown before is kept as far as it is the same.
export class Markdown {
  constructor() {
    this.element = h("div", { class: "markdown" });
    this.restart();
  }

  restart() {
    this.text = "";
    this.settled = 0; // characters before the last block
    this.last = null;
    this.element.replaceChildren();
  }

  show(text, isOpen = false) {
    if (!text.startsWith(this.text)) this.restart();
    this.text = text;
    const lines = text.slice(this.settled).split("\n");
    const found = blocks(lines, isOpen);
    if (found.length === 0) return;
    const rest = this.adopt(found[0]) ? found.slice(1) : found;
    if (rest === found) this.last?.element.remove();
    for (const block of rest) this.add(block);
    // Only the last block can still change.
    this.settled += lines.slice(0, found.at(-1).line).join("\n").length + (found.at(-1).line ? 1 : 0);
  }

  // All of it has come. What was guessed while it came, and wrong, is made anew.
  finish(text) {
    this.show(text);
    const whole = new Markdown();
    whole.show(text);
    if (!whole.element.isEqualNode(this.element)) this.element.replaceChildren(...whole.element.childNodes);
  }

  add(block) {
    const code = block.kind === "code" ? newCode(block) : null;
    this.last = { element: code?.element ?? elementOf(block), code };
    this.element.append(this.last.element);
  }

  // Code that has grown goes on in the element that it has.
  adopt(block) {
    const code = this.last?.code;
    if (!code || block.kind !== "code" || block.language !== code.language) return false;
    code.show(block.text);
    return true;
  }
}

// [{kind, line, ...}]: each begins at its line. `isOpen`: the last line may go on.
function blocks(lines, isOpen, depth = 0) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const block = depth < MAX_DEPTH ? blockAt(lines, at, isOpen, depth) : paragraph(lines, at, isOpen, () => false);
    found.push({ ...block, line: at });
    at = block.end;
  }
  return found;
}

function blockAt(lines, at, isOpen, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return code(lines, at, isOpen);
  if (HEADING.test(line)) return heading(lines, at, isOpen);
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (QUOTE.test(line)) return quote(lines, at, isOpen, depth);
  if (ITEM.test(line)) return list(lines, at, isOpen, depth);
  if (isTable(lines, at, isOpen)) return table(lines, at, isOpen);
  return paragraph(lines, at, isOpen, interrupts);
}

// Whether a line ends the paragraph before it. An empty item does not, nor does a number but 1: a sentence may have it.
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
  const [mark, signs] = HEADING.exec(lines[at]);
  const text = lines[at].slice(mark.length).trim().replace(/(?:^|[ \t])#+$/, "").trim();
  return { kind: "heading", level: signs.length, text, isOpen: isOpen && at + 1 === lines.length, end: at + 1 };
}

function code(lines, at, isOpen) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const indent = indentOf(lines[at]);
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], fence)) end += 1;
  const inside = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line))));
  // An empty last line, and one that may become the end, wait for what follows them.
  const waits = isOpen ? /^(?:`+|~+|)$/ : /^$/;
  if (end === lines.length && inside.length && waits.test(inside.at(-1))) inside.pop();
  return { kind: "code", language: language.trim().split(/\s/)[0], text: inside.join("\n"), end: Math.min(lines.length, end + 1) };
}

function closes(line, fence) {
  const found = FENCE.exec(line);
  return found !== null && !found[2].trim() && found[1][0] === fence[0] && found[1].length >= fence.length;
}

function quote(lines, at, isOpen, depth) {
  let end = at;
  while (end < lines.length && (QUOTE.test(lines[end]) || (lines[end].trim() && !interrupts(lines, end, isOpen)))) end += 1;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { kind: "quote", blocks: blocks(inside, isOpen && end === lines.length, depth + 1), end };
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
    items.push(blocks(item.lines, isOpen && isLast, depth + 1));
    isLoose ||= item.isLoose || (item.blankAfter && !isLast && ITEM.test(lines[item.end]));
    end = item.end;
  }
  return { kind: "list", start: isOrdered ? parseInt(first[2], 10) : null, isLoose, items, end };
}

// The lines of one item without their indent. Blank ones at its end are passed over.
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
      // Two spaces are enough: models do not count them.
      const isOwn = indentOf(line) >= Math.min(indent, base + 2);
      const isLazy = blanks === 0 && !ITEM.test(line) && !interrupts(lines, end, false);
      if (!isOwn && !isLazy) break;
    }
    isLoose ||= blanks > 0 && !ITEM.test(inside);
    for (; blanks > 0; blanks -= 1) own.push("");
    own.push(inside);
    if (fence !== null) fence = closes(inside, fence) ? null : fence;
    else fence = FENCE.exec(inside)?.[1] ?? null;
  }
  return { lines: own, end, isLoose, blankAfter: blanks > 0 };
}

// A row, and one of dashes below it. While it comes, a row that begins with a bar is believed to be one.
function isTable(lines, at, isOpen) {
  if (!lines[at].includes("|")) return false;
  const isEnd = isOpen && at + 2 >= lines.length;
  const next = lines[at + 1] ?? "";
  if (isEnd && lines[at].trim().startsWith("|") && /^[ |:-]*$/.test(next)) return true;
  if (!next.includes("-")) return false;
  const aligned = cells(next);
  return aligned.every((cell) => ALIGNED.test(cell)) && aligned.length === cells(lines[at]).length;
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

function newCode(block) {
  const shown = new Code(block.language);
  shown.show(block.text);
  return shown;
}

function elementOf(block) {
  if (block.kind === "code") return newCode(block).element;
  if (block.kind === "rule") return h("hr");
  if (block.kind === "quote") return wrap("blockquote", {}, block.blocks.map(elementOf));
  if (block.kind === "list") return listElement(block);
  if (block.kind === "table") return tableElement(block);
  const tag = block.kind === "heading" ? `h${Math.min(6, block.level + TOP_HEADING - 1)}` : "p";
  return wrap(tag, {}, inline(block.text, block.isOpen));
}

function listElement({ start, isLoose, items }) {
  const isBare = (block) => !isLoose && block.kind === "paragraph";
  const inside = (item) => item.flatMap((block) => (isBare(block) ? inline(block.text, block.isOpen) : [elementOf(block)]));
  const attributes = start === null || start === 1 ? {} : { start: String(start) };
  return wrap(start === null ? "ul" : "ol", attributes, items.map((item) => wrap("li", {}, inside(item))));
}

function tableElement({ align, head, rows, isOpen }) {
  const cell = (tag, text, place, isLast) => wrap(tag, { class: align[place] ?? null }, inline(text, isOpen && isLast));
  const row = (tag, texts, isLast) => wrap("tr", {}, texts.map((text, place) => cell(tag, text, place, isLast)));
  const body = wrap("tbody", {}, rows.map((texts, place) => row("td", texts, place === rows.length - 1)));
  const shown = h("table", {}, h("thead", {}, row("th", head, rows.length === 0)), body);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, shown);
}
