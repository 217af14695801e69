// A chat to try it: streams, and says of each reply how much of its prompt was cached, when its first token came and how
// fast the others followed. How messages look is messages.js; what a reload finds again is kept.js.

import { byId, h } from "./dom.js";
import { forget, keep, kept } from "./kept.js";
import { Reply, question } from "./messages.js";
import { events, get, request } from "./server.js";

const NEAR_PX = 40; // of the end: then the log follows what comes
const ASK_AFTER_MS = [200, 600, 1500];
const FIELDS = ["system", "temperature", "max_tokens"];
const EMPTY = "Each reply shows how much of its prompt was cached, when its first token came and how fast the others followed.";

export class Chat {
  constructor(onError) {
    this.onError = onError;
    this.model = "";
    this.hasTemplate = true;
    this.stopping = null; // while a reply comes
    this.form = byId("chat");
    this.log = byId("chat-log");
    this.stop = byId("chat-stop");
    this.again = byId("chat-again");
    this.sum = byId("chat-settings-sum");
    this.restore();
    this.listen();
  }

  listen() {
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.form.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
    for (const name of FIELDS) this.form[name].addEventListener("change", () => this.noteSettings());
    // A browser cannot point at a wrong setting that is folded away.
    this.form.addEventListener("invalid", (event) => event.target.closest("details")?.setAttribute("open", ""), true);
    this.stop.addEventListener("click", () => this.stopping?.abort());
    this.again.addEventListener("click", () => this.askAgain());
    byId("chat-new").addEventListener("click", () => this.reset());
    // A reload in the middle of a reply keeps what had come. (The second is for browsers that do not tell the first.)
    for (const name of ["beforeunload", "pagehide"]) addEventListener(name, () => this.leave());
  }

  use(props) {
    // Nothing scrolls before the page is shown.
    if (!this.model) this.log.scrollTop = this.log.scrollHeight;
    this.model = props.model.name;
    this.hasTemplate = props.model.chat_template;
    const usual = String(props.sampling?.temperature ?? "");
    if (this.form.temperature.placeholder === usual) return;
    this.form.temperature.placeholder = usual;
    this.sumUp();
  }

  restore() {
    const { settings, turns } = kept();
    for (const name of FIELDS) if (typeof settings[name] === "string") this.form[name].value = settings[name];
    this.turns = turns.map(whole);
    this.show();
  }

  leave() {
    if (!this.stopping) return;
    this.turns.at(-1).stopped = true;
    this.save();
    this.stopping.abort();
  }

  reset() {
    this.stopping?.abort();
    this.stopping = null;
    this.turns = [];
    this.show();
    this.save();
    this.form.text.focus();
  }

  show() {
    const shown = this.turns.map((turn) => {
      if (turn.role === "user") return question(turn.content);
      const reply = new Reply();
      reply.finish(turn);
      return reply.element;
    });
    this.log.replaceChildren(...(shown.length ? shown : [h("li", { class: "empty" }, EMPTY)]));
    this.log.scrollTop = this.log.scrollHeight;
    this.busy(false);
    this.sumUp();
  }

  noteSettings() {
    this.sumUp();
    this.save();
  }

  // What is set, where it can be read without unfolding it.
  sumUp() {
    const { system, temperature, max_tokens: most } = this.form;
    const words = [`temperature ${temperature.value || temperature.placeholder || "of the model"}`];
    words.push(most.value ? `at most ${most.value} tokens` : "up to the context's end");
    if (system.value.trim()) words.push("with a system prompt");
    this.sum.textContent = words.join(", ");
  }

  save() {
    const settings = Object.fromEntries(FIELDS.map((name) => [name, this.form[name].value]));
    const changed = FIELDS.some((name) => this.form[name].value !== this.form[name].defaultValue);
    if (this.turns.length || changed) keep({ settings, turns: this.turns });
    else forget();
  }

  async send() {
    if (this.stopping) return;
    const text = this.form.text.value;
    if (!text.trim()) return;
    this.form.text.value = "";
    this.log.querySelector(".empty")?.remove();
    this.turns.push({ role: "user", content: text });
    this.log.append(question(text));
    await this.answer();
  }

  // The last reply is thrown away and asked for anew.
  async askAgain() {
    if (this.stopping || this.turns.at(-1)?.role !== "assistant") return;
    this.turns.pop();
    this.log.lastChild.remove();
    await this.answer();
  }

  async answer() {
    // A new chat may begin before this reply has ended.
    const { turns } = this;
    const stopping = new AbortController();
    const body = this.body();
    const turn = whole({ role: "assistant", content: "" });
    const reply = new Reply();
    turns.push(turn);
    this.log.append(reply.element);
    this.log.scrollTop = this.log.scrollHeight;
    this.stopping = stopping;
    this.busy(true);
    this.save();
    const drawing = new Drawing(() => this.following(() => reply.grow(turn)));
    drawing.ask();
    await this.stream(turn, body, stopping.signal, drawing).catch((error) => {
      turn.stopped = stopping.signal.aborted;
      if (!turn.stopped) this.fail(turn, error);
    });
    drawing.end();
    if (this.turns !== turns) return;
    this.stopping = null;
    this.following(() => reply.finish(turn));
    this.busy(false);
    this.save();
    if (turn.stopped) this.askWhatItTook(turn, reply, turns);
  }

  async stream(turn, body, signal, drawing) {
    const times = { began: performance.now(), first: null, answered: null };
    const response = await request("POST", this.path, body, signal);
    noteHeaders(turn, response.headers);
    for await (const { data, comment } of events(response)) {
      if (comment?.startsWith("prefill")) turn.doing = `reading the prompt: ${comment.slice(8)} tokens`;
      if (data !== undefined && data !== "[DONE]") take(turn, times, JSON.parse(data));
      drawing.ask();
    }
  }

  fail(turn, error) {
    turn.error = error.message;
    this.onError(error);
  }

  // Who stops hears no figures. The server has them as soon as it has seen that nobody listens.
  async askWhatItTook(turn, reply, turns) {
    const found = turn.id && (await ended(turn.id));
    if (!found || this.turns !== turns) return;
    turn.figures.cached = found.cached_tokens;
    turn.figures.prompt = found.prompt_tokens;
    turn.figures.rate = found.tokens_per_s;
    reply.finish(turn);
    this.save();
  }

  get path() {
    return this.hasTemplate ? "/v1/chat/completions" : "/v1/completions";
  }

  body() {
    const { system, temperature, max_tokens: most } = this.form;
    const messages = this.turns.filter((turn) => turn.content || turn.thinking).map(message);
    if (system.value.trim()) messages.unshift({ role: "system", content: system.value });
    const prompt = this.hasTemplate ? { messages } : { prompt: messages.map(({ content }) => content).join("\n") };
    const body = { model: this.model, ...prompt, stream: true, stream_options: { include_usage: true } };
    if (most.value) body.max_tokens = Number(most.value);
    if (temperature.value) body.temperature = Number(temperature.value);
    return body;
  }

  // The log stays at its end, unless somebody has scrolled up to read.
  following(draw) {
    const { log } = this;
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
    draw();
    if (follows) log.scrollTop = log.scrollHeight;
  }

  busy(busy) {
    const hadFocus = [this.form.send, this.stop, this.again].includes(document.activeElement);
    this.form.send.hidden = busy;
    this.stop.hidden = !busy;
    this.again.hidden = busy || this.turns.at(-1)?.role !== "assistant";
    if (hadFocus) (busy ? this.stop : this.form.text).focus({ preventScroll: true });
  }
}

// Once for each frame, however many pieces come in it.
class Drawing {
  constructor(draw) {
    this.draw = draw;
    this.frame = 0;
  }

  ask() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  end() {
    cancelAnimationFrame(this.frame);
  }
}

// With everything that a turn may say, also where an earlier page has kept less.
function whole(turn) {
  const figures = { cached: null, prompt: null, why: "", firstMs: null, rate: null, ...turn.figures };
  return { thinking: "", thoughtMs: 0, doing: "", id: null, stopped: false, error: "", ...turn, figures };
}

// What the model thought is for its template to show or to leave out.
function message({ role, content, thinking }) {
  return thinking ? { role, content, reasoning_content: thinking } : { role, content };
}

function noteHeaders(turn, headers) {
  const [miss, ...notes] = (headers.get("x-kvstrata-miss") ?? "").split("; ");
  const replayed = notes.find((note) => note.startsWith("replayed="))?.slice("replayed=".length);
  turn.figures.why = [miss === "complete" ? "" : miss, replayed ? `${replayed} replayed` : ""].filter(Boolean).join(", ");
  turn.id = headers.get("x-request-id");
}

function take(turn, times, event) {
  if (event.error) throw new Error(event.error.message);
  const now = performance.now();
  for (const choice of event.choices) {
    const thought = choice.delta?.reasoning_content ?? "";
    const said = choice.delta?.content ?? choice.text ?? "";
    if (thought || said) times.first ??= now;
    if (said) times.answered ??= now;
    turn.thinking += thought;
    turn.content += said;
  }
  if (times.first !== null) {
    turn.doing = "";
    turn.figures.firstMs = times.first - times.began;
    turn.thoughtMs = turn.thinking ? (times.answered ?? now) - times.first : 0;
  }
  if (event.usage) noteUsage(turn, event.usage, times.first === null ? 0 : now - times.first);
}

function noteUsage(turn, usage, writingMs) {
  const { prompt_tokens: prompt, completion_tokens: written, prompt_tokens_details: details } = usage;
  const rate = written > 1 && writingMs > 0 ? (1000 * (written - 1)) / writingMs : null;
  turn.figures = { ...turn.figures, cached: details.cached_tokens, prompt, rate };
}

// A request that has ended, as the server remembers it.
async function ended(id) {
  for (const waitMs of ASK_AFTER_MS) {
    await new Promise((resolve) => setTimeout(resolve, waitMs));
    const { requests } = await get(`/cache/history?since=${Date.now() / 1000 - 60}`).catch(() => ({ requests: [] }));
    const found = requests.find((each) => each.id === id);
    if (found) return found;
  }
  return null;
}
