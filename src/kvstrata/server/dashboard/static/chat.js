// A chat to try it: streams, and says of each answer how much of its prompt was cached and when its first token came.

import { byId, count, h } from "./dom.js";
import { events, request } from "./server.js";

export class Chat {
  constructor(onError) {
    this.onError = onError;
    this.model = "";
    this.hasTemplate = true;
    this.messages = [];
    this.stopping = null; // while an answer runs
    this.form = byId("chat");
    this.log = byId("chat-log");
    this.stop = byId("chat-stop");
    this.reset();
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.form.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
    this.stop.addEventListener("click", () => this.stopping?.abort());
    byId("chat-new").addEventListener("click", () => this.reset());
  }

  use(props) {
    this.model = props.model.name;
    this.hasTemplate = props.model.chat_template;
  }

  reset() {
    this.stopping?.abort();
    this.messages = [];
    this.log.replaceChildren(h("li", { class: "empty" }, "Each answer shows how much of its prompt was cached, and how long its first token took."));
  }

  async send() {
    if (this.stopping) return;
    const text = this.form.text.value;
    this.form.text.value = "";
    this.log.querySelector(".empty")?.remove();
    this.messages.push({ role: "user", content: text });
    this.add("user", text);
    const answer = this.add("assistant", "");
    this.stopping = new AbortController();
    this.busy(true);
    // A new chat may begin before this one has ended.
    const messages = this.messages;
    await this.stream(answer, messages).catch((error) => this.fail(answer, messages, error));
    this.stopping = null;
    this.busy(false);
  }

  async stream(answer, messages) {
    const began = performance.now();
    const turn = { text: "", first: null, usage: null, notes: [], began };
    const response = await request("POST", this.path, this.body(), this.stopping.signal);
    [turn.miss, ...turn.notes] = (response.headers.get("x-kvstrata-miss") ?? "").split("; ");
    for await (const { data, comment } of events(response)) {
      if (comment?.startsWith("prefill")) answer.note.textContent = `reading the prompt: ${comment.slice(8)} tokens`;
      if (data === undefined || data === "[DONE]") continue;
      this.take(turn, JSON.parse(data), answer);
    }
    messages.push({ role: "assistant", content: turn.text });
    answer.note.replaceChildren(...summary(turn));
  }

  take(turn, event, answer) {
    if (event.error) throw new Error(event.error.message);
    turn.usage = event.usage ?? turn.usage;
    for (const choice of event.choices) {
      const piece = choice.delta?.content ?? choice.text ?? "";
      if (piece) turn.first ??= performance.now();
      turn.text += piece;
    }
    const follow = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    answer.text.textContent = turn.text;
    if (follow) this.log.scrollTop = this.log.scrollHeight;
  }

  get path() {
    return this.hasTemplate ? "/v1/chat/completions" : "/v1/completions";
  }

  body() {
    const prompt = this.hasTemplate ? { messages: this.messages } : { prompt: this.messages.map((message) => message.content).join("\n") };
    const limit = Number(this.form.max_tokens.value) || 256;
    return { model: this.model, ...prompt, max_tokens: limit, temperature: 0.7, stream: true, stream_options: { include_usage: true } };
  }

  add(role, text) {
    const message = { text: h("p", {}, text), note: h("footer") };
    const who = h("span", { class: "hush" }, role === "user" ? "You: " : "Model: ");
    this.log.append(h("li", { class: `message ${role}` }, who, message.text, ...(role === "user" ? [] : [message.note])));
    this.log.scrollTop = this.log.scrollHeight;
    return message;
  }

  fail(answer, messages, error) {
    const stopped = error.name === "AbortError";
    // What was not answered is asked again with the next message.
    if (stopped && answer.text.textContent) messages.push({ role: "assistant", content: answer.text.textContent });
    answer.note.replaceChildren(h("span", { class: stopped ? "" : "error" }, stopped ? "stopped" : error.message));
    if (!stopped) this.onError(error);
  }

  busy(busy) {
    this.form.send.hidden = busy;
    this.stop.hidden = !busy;
    if (!busy) this.form.text.focus({ preventScroll: true });
  }
}

function summary(turn) {
  const seconds = (from, to) => ((to - from) / 1000).toFixed(2);
  const first = turn.first === null ? "no text" : `first token after ${seconds(turn.began, turn.first)} s`;
  if (turn.usage === null) return [first];
  const { prompt_tokens: prompt, completion_tokens: completion, prompt_tokens_details: details } = turn.usage;
  const rate = turn.first === null || completion < 2 ? "" : `, ${((1000 * (completion - 1)) / (performance.now() - turn.first)).toFixed(1)} tokens/s`;
  const replayed = turn.notes.find((note) => note.startsWith("replayed="));
  const words = [turn.miss === "complete" ? "" : turn.miss, replayed ? `${replayed.slice(9)} replayed` : ""].filter(Boolean);
  const why = words.length ? ` (${words.join(", ")})` : "";
  return [h("b", {}, `${count(details.cached_tokens)} of ${count(prompt)}`), ` prompt tokens cached${why}, ${first}${rate}`];
}
