// A chat to try the model: streams replies as Markdown and shows for each how much of its prompt was cached, its time to
// first token and its decode speed. The chat is kept in session storage, so a reload loses nothing; it ends with the tab.

import { byId, formatCount, h } from "./dom.js";
import { Markdown } from "./markdown.js";
import { get, request, streamEvents } from "./server.js";

const STORAGE = "kvstrata.chat";
const NEAR_END_PX = 40; // within this distance of its end the log follows new text
const RETRY_DELAYS_MS = [200, 600, 1500];
const FIELDS = ["system", "temperature", "max_tokens"];
const EMPTY = "Each reply shows how much of its prompt was cached, its time to first token and its decode speed.";

export class Chat {
  constructor(onError) {
    this.onError = onError;
    this.model = "";
    this.hasTemplate = true;
    this.aborter = null; // of the reply that is being streamed
    this.form = byId("chat");
    this.log = byId("chat-log");
    this.stopButton = byId("chat-stop");
    this.regenerateButton = byId("chat-regenerate");
    this.summary = byId("chat-settings-summary");
    this.restore();
    this.addListeners();
  }

  addListeners() {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.form.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
    for (const name of FIELDS) this.form[name].addEventListener("change", () => this.onSettings());
    // A browser cannot show the error of a setting inside a closed <details>.
    this.form.addEventListener("invalid", (event) => event.target.closest("details")?.setAttribute("open", ""), true);
    this.stopButton.addEventListener("click", () => this.aborter?.abort());
    this.regenerateButton.addEventListener("click", () => this.regenerate());
    byId("chat-new").addEventListener("click", () => this.reset());
    // A reload during a reply keeps the text received so far. Some browsers do not send `beforeunload`.
    for (const name of ["beforeunload", "pagehide"]) addEventListener(name, () => this.onUnload());
  }

  update(props) {
    // A hidden log cannot be scrolled, so this waits until the page is shown.
    if (!this.model) this.log.scrollTop = this.log.scrollHeight;
    this.model = props.model.name;
    this.hasTemplate = props.model.chat_template;
    const defaultTemperature = String(props.sampling?.temperature ?? "");
    if (this.form.temperature.placeholder === defaultTemperature) return;
    this.form.temperature.placeholder = defaultTemperature;
    this.showSettings();
  }

  restore() {
    const { settings, turns } = loadChat();
    for (const name of FIELDS) if (typeof settings[name] === "string") this.form[name].value = settings[name];
    this.turns = turns.map(completeTurn);
    this.show();
  }

  onUnload() {
    if (!this.aborter) return;
    this.turns.at(-1).stopped = true;
    this.save();
    this.aborter.abort();
  }

  reset() {
    this.aborter?.abort();
    this.aborter = null;
    this.turns = [];
    this.show();
    this.save();
    this.form.text.focus();
  }

  show() {
    const elements = this.turns.map((turn) => {
      if (turn.role === "user") return userMessage(turn.content);
      const reply = new Reply();
      reply.finish(turn);
      return reply.element;
    });
    this.log.replaceChildren(...(elements.length ? elements : [h("li", { class: "empty" }, EMPTY)]));
    this.log.scrollTop = this.log.scrollHeight;
    this.showBusy(false);
    this.showSettings();
  }

  onSettings() {
    this.showSettings();
    this.save();
  }

  // Settings in words, readable while they are folded.
  showSettings() {
    const { system, temperature, max_tokens: maxTokens } = this.form;
    const settings = [`temperature ${temperature.value || temperature.placeholder || "of the model"}`];
    settings.push(maxTokens.value ? `at most ${maxTokens.value} tokens` : "up to the context length");
    if (system.value.trim()) settings.push("with a system prompt");
    this.summary.textContent = settings.join(", ");
  }

  save() {
    const settings = Object.fromEntries(FIELDS.map((name) => [name, this.form[name].value]));
    const changed = FIELDS.some((name) => this.form[name].value !== this.form[name].defaultValue);
    if (this.turns.length || changed) storeChat({ settings, turns: this.turns });
    else sessionStorage.removeItem(STORAGE);
  }

  async send() {
    if (this.aborter) return;
    const text = this.form.text.value;
    if (!text.trim()) return;
    this.form.text.value = "";
    this.log.querySelector(".empty")?.remove();
    this.turns.push({ role: "user", content: text });
    this.log.append(userMessage(text));
    await this.streamReply();
  }

  async regenerate() {
    if (this.aborter || this.turns.at(-1)?.role !== "assistant") return;
    this.turns.pop();
    this.log.lastChild.remove();
    await this.streamReply();
  }

  async streamReply() {
    // The user may start a new chat, which replaces `this.turns`, while the reply is streamed.
    const { turns } = this;
    const aborter = new AbortController();
    const body = this.body();
    const turn = completeTurn({ role: "assistant", content: "" });
    const reply = new Reply();
    turns.push(turn);
    this.log.append(reply.element);
    this.log.scrollTop = this.log.scrollHeight;
    this.aborter = aborter;
    this.showBusy(true);
    this.save();
    const redraw = new FrameScheduler(() => this.keepAtEnd(() => reply.update(turn)));
    redraw.request();
    await this.receive(turn, body, aborter.signal, redraw).catch((error) => {
      turn.stopped = aborter.signal.aborted;
      if (!turn.stopped) this.fail(turn, error);
    });
    redraw.cancel();
    if (this.turns !== turns) return;
    this.aborter = null;
    this.keepAtEnd(() => reply.finish(turn));
    this.showBusy(false);
    this.save();
    if (turn.stopped) this.loadFigures(turn, reply, turns);
  }

  async receive(turn, body, signal, redraw) {
    const times = { start: performance.now(), firstToken: null, firstContent: null };
    const response = await request("POST", this.path, body, signal);
    readHeaders(turn, response.headers);
    for await (const { data, comment } of streamEvents(response)) {
      if (comment?.startsWith("prefill")) turn.progress = `prefill: ${comment.slice(8)} tokens`;
      if (data !== undefined && data !== "[DONE]") readEvent(turn, times, JSON.parse(data));
      redraw.request();
    }
  }

  fail(turn, error) {
    turn.error = error.message;
    this.onError(error);
  }

  // A stopped stream ends without usage. The server has the figures once it has noticed the disconnect.
  async loadFigures(turn, reply, turns) {
    const finished = turn.id && (await finishedRequest(turn.id));
    if (!finished || this.turns !== turns) return;
    turn.figures.cached = finished.cached_tokens;
    turn.figures.prompt = finished.prompt_tokens;
    turn.figures.rate = finished.tokens_per_s;
    reply.finish(turn);
    this.save();
  }

  get path() {
    return this.hasTemplate ? "/v1/chat/completions" : "/v1/completions";
  }

  body() {
    const { system, temperature, max_tokens: maxTokens } = this.form;
    const messages = this.turns.filter((turn) => turn.content || turn.thinking).map(requestMessage);
    if (system.value.trim()) messages.unshift({ role: "system", content: system.value });
    const prompt = this.hasTemplate ? { messages } : { prompt: messages.map(({ content }) => content).join("\n") };
    const body = { model: this.model, ...prompt, stream: true, stream_options: { include_usage: true } };
    if (maxTokens.value) body.max_tokens = Number(maxTokens.value);
    if (temperature.value) body.temperature = Number(temperature.value);
    return body;
  }

  // The log stays at its end unless the user has scrolled up.
  keepAtEnd(draw) {
    const { log } = this;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
    draw();
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  showBusy(isBusy) {
    const hadFocus = [this.form.send, this.stopButton, this.regenerateButton].includes(document.activeElement);
    this.form.send.hidden = isBusy;
    this.stopButton.hidden = !isBusy;
    this.regenerateButton.hidden = isBusy || this.turns.at(-1)?.role !== "assistant";
    if (hadFocus) (isBusy ? this.stopButton : this.form.text).focus({ preventScroll: true });
  }
}

// Draws at most once per frame.
class FrameScheduler {
  constructor(draw) {
    this.draw = draw;
    this.frame = 0;
  }

  request() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  cancel() {
    cancelAnimationFrame(this.frame);
  }
}

// A turn with all of its fields; a stored turn may lack some.
function completeTurn(turn) {
  const figures = { cached: null, prompt: null, miss: "", ttftMs: null, rate: null, ...turn.figures };
  return { thinking: "", thinkingMs: 0, progress: "", id: null, stopped: false, error: "", ...turn, figures };
}

// The model's template decides whether earlier thinking is shown to the model.
function requestMessage({ role, content, thinking }) {
  return thinking ? { role, content, reasoning_content: thinking } : { role, content };
}

function readHeaders(turn, headers) {
  const [miss, ...notes] = (headers.get("x-kvstrata-miss") ?? "").split("; ");
  const replayed = notes.find((note) => note.startsWith("replayed="))?.slice("replayed=".length);
  turn.figures.miss = [miss === "complete" ? "" : miss, replayed ? `${replayed} replayed` : ""].filter(Boolean).join(", ");
  turn.id = headers.get("x-request-id");
}

function readEvent(turn, times, event) {
  if (event.error) throw new Error(event.error.message);
  const now = performance.now();
  for (const choice of event.choices) {
    const thinking = choice.delta?.reasoning_content ?? "";
    const content = choice.delta?.content ?? choice.text ?? "";
    if (thinking || content) times.firstToken ??= now;
    if (content) times.firstContent ??= now;
    turn.thinking += thinking;
    turn.content += content;
  }
  if (times.firstToken !== null) {
    turn.progress = "";
    turn.figures.ttftMs = times.firstToken - times.start;
    turn.thinkingMs = turn.thinking ? (times.firstContent ?? now) - times.firstToken : 0;
  }
  if (event.usage) readUsage(turn, event.usage, times.firstToken === null ? 0 : now - times.firstToken);
}

function readUsage(turn, usage, decodeMs) {
  const { prompt_tokens: prompt, completion_tokens: written, prompt_tokens_details: details } = usage;
  const rate = written > 1 && decodeMs > 0 ? (1000 * (written - 1)) / decodeMs : null;
  turn.figures = { ...turn.figures, cached: details.cached_tokens, prompt, rate };
}

// The history entry of a finished request, or null.
async function finishedRequest(id) {
  for (const waitMs of RETRY_DELAYS_MS) {
    await new Promise((resolve) => setTimeout(resolve, waitMs));
    const { requests } = await get(`/cache/history?since=${Date.now() / 1000 - 60}`).catch(() => ({ requests: [] }));
    const entry = requests.find((each) => each.id === id);
    if (entry) return entry;
  }
  return null;
}

function userMessage(text) {
  return h("li", { class: "message user" }, speaker("You"), h("div", { class: "content" }, text));
}

// One reply in the log: Markdown, with its thinking folded above it and its figures below.
// A turn: {content, thinking, thinkingMs, figures, progress, stopped, error}.
class Reply {
  constructor() {
    this.content = new Markdown();
    this.content.element.classList.add("content");
    this.thinking = new Markdown();
    this.summary = h("summary");
    this.details = h("details", { class: "thinking", hidden: true }, this.summary, this.thinking.element);
    this.footer = h("footer");
    this.element = h("li", { class: "message assistant" }, speaker("Model"), this.details, this.content.element, this.footer);
  }

  // Draws a reply that is being streamed; screen readers wait until it is complete.
  update(turn) {
    this.element.setAttribute("aria-busy", "true");
    this.thinking.show(turn.thinking, true);
    this.content.show(turn.content, true);
    this.showRest(turn, true);
  }

  finish(turn) {
    this.element.removeAttribute("aria-busy");
    this.thinking.finish(turn.thinking);
    this.content.finish(turn.content);
    this.showRest(turn, false);
  }

  showRest(turn, isOpen) {
    this.details.hidden = !turn.thinking;
    this.content.element.hidden = !turn.content && !(isOpen && !turn.thinking);
    this.element.classList.toggle("waiting", isOpen && !turn.content && !turn.thinking);
    setText(this.summary, thinkingSummary(turn, isOpen));
    if (isOpen) setText(this.footer, turn.progress);
    else this.footer.replaceChildren(...figuresOf(turn));
  }
}

const speaker = (name) => h("span", { class: "visually-hidden" }, `${name}: `);

// Screen readers would read unchanged text again.
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function thinkingSummary(turn, isOpen) {
  if (isOpen && !turn.content) return "Thinking …";
  return turn.thinkingMs ? `Thought for ${formatSeconds(turn.thinkingMs)}` : "Thinking";
}

function figuresOf(turn) {
  if (turn.error) return [h("span", { class: "error" }, turn.error)];
  const { cached, prompt, miss, ttftMs, rate } = turn.figures;
  const parts = [];
  if (turn.stopped) parts.push("stopped");
  if (cached !== null) {
    const tokens = prompt === null ? formatCount(cached) : `${formatCount(cached)} of ${formatCount(prompt)}`;
    parts.push([h("b", {}, tokens), ` prompt tokens cached${miss ? ` (${miss})` : ""}`]);
  }
  if (ttftMs !== null) parts.push(`time to first token ${formatSeconds(ttftMs)}`);
  else if (!turn.stopped) parts.push("no text");
  if (rate !== null) parts.push(`${rate.toFixed(1)} tokens/s`);
  return parts.flatMap((part, index) => (index ? [", ", part] : [part])).flat();
}

const formatSeconds = (ms) => `${(ms / 1000).toFixed(2)}\u00a0s`;

function storeChat(chat) {
  try {
    sessionStorage.setItem(STORAGE, JSON.stringify(chat));
  } catch {
    // Session storage holds some megabytes. A longer chat continues without it.
    sessionStorage.removeItem(STORAGE);
  }
}

// {settings, turns}; empty where nothing is stored, or nothing that this version of the page can read.
function loadChat() {
  try {
    const chat = JSON.parse(sessionStorage.getItem(STORAGE)) ?? {};
    const turns = Array.isArray(chat.turns) ? chat.turns.filter(isTurn) : [];
    return { settings: chat.settings ?? {}, turns };
  } catch {
    return { settings: {}, turns: [] };
  }
}

const isTurn = (turn) => ["user", "assistant"].includes(turn?.role) && typeof turn.content === "string";
