// Explain a miss: how much of a prompt is cached, and the text around the token where that ends.

import { byId, count, h, percent } from "./dom.js";
import { post } from "./server.js";
import { sentence } from "./sessions.js";

export class Explain {
  constructor(onError) {
    this.onError = onError;
    this.form = byId("explain");
    this.result = byId("explain-result");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
  }

  async send() {
    try {
      this.show(await post("/cache/explain", this.body()));
    } catch (error) {
      this.result.replaceChildren(h("p", { class: "error" }, error.message));
      this.onError(error);
    }
  }

  body() {
    const text = this.form.text.value;
    const salt = this.form.salt.value ? { cache_salt: this.form.salt.value } : {};
    if (this.form.kind.value === "chat") return { messages: [{ role: "user", content: text }], ...salt };
    if (this.form.kind.value === "prompt") return { prompt: text, ...salt };
    return { ...JSON.parse(text), ...salt };
  }

  show(answer) {
    const cached = h("i", { class: "kept" });
    cached.style.width = `${(100 * answer.cached_tokens) / answer.prompt_tokens}%`;
    const tiers = Object.entries(answer.by_tier).filter(([, tokens]) => tokens);
    const instead = answer.instead.map((text) => JSON.stringify(text)).join(" or ");
    this.result.replaceChildren(
      h("p", { class: "headline" }, `${count(answer.cached_tokens)} of ${count(answer.prompt_tokens)} tokens are cached (${percent(answer.cached_tokens, answer.prompt_tokens)})`),
      h("div", { class: "bar", "aria-hidden": "true" }, cached),
      h("p", {}, `It ends at token ${count(answer.at_token)}, ${answer.ends_because}: ${answer.meaning}`),
      h("p", { class: "around" }, h("span", { class: "hit" }, answer.before), h("mark", {}, answer.after)),
      ...(instead ? [h("p", { class: "hint" }, `Stored there instead: ${instead}`)] : []),
      ...(answer.session?.parted ? [h("p", { class: "hint" }, `Session ${answer.session.id}: ${sentence(answer.session.parted)}`)] : []),
      ...done(answer).map((text) => h("p", { class: "hint" }, text)),
      ...(answer.remote_paused_because ? [h("p", { class: "hint" }, `The remote cache is left alone: ${answer.remote_paused_because}`)] : []),
      ...(tiers.length ? [h("p", { class: "hint" }, tiers.map(([tier, tokens]) => `${count(tokens)} from ${tier}`).join(", "))] : []),
    );
  }
}

const RULES = {
  nonce: "lines that change with every request were left out of system messages",
  system_in_place: "system messages in the middle of the chat stayed where they are",
};

// What was done to the prompt so that it stays the same from turn to turn.
function done({ replayed_turns: turns, replayed_tokens: tokens, hygiene }) {
  const replies = turns === 1 ? "1 earlier reply stands" : `${count(turns)} earlier replies stand`;
  const replayed = turns ? [`${replies} there as sampled: ${count(tokens)} tokens.`] : [];
  return [...replayed, ...Object.entries(hygiene).map(([rule, times]) => `${RULES[rule] ?? rule}: ${count(times)}.`)];
}
