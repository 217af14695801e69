// A block of code with a button that copies it. What grows is appended to, so that a selection in it stays.

import { h } from "./dom.js";

const SAID_MS = 1500;

export class Code {
  constructor(language) {
    this.language = language;
    this.text = document.createTextNode("");
    this.button = h("button", { type: "button", class: "link copy" }, "Copy");
    this.button.addEventListener("click", () => this.copy());
    const code = h("code", {}, this.text);
    const label = language ? `Code, ${language}` : "Code";
    // Wide code scrolls, which the keyboard must reach.
    this.pre = h("pre", { tabindex: "0", role: "region", "aria-label": label }, code);
    this.element = h("figure", { class: "code" }, h("figcaption", {}, h("span", {}, language), this.button), this.pre);
  }

  show(text) {
    const shown = this.text.data;
    if (text.startsWith(shown)) this.text.appendData(text.slice(shown.length));
    else this.text.data = text;
  }

  async copy() {
    const done = await copyText(this.text.data, this.pre);
    this.button.textContent = done ? "Copied" : "Selected";
    setTimeout(() => (this.button.textContent = "Copy"), SAID_MS);
  }
}

// Only pages that came over https or from this machine may use the clipboard. Elsewhere the code is selected, and the
// browser's old command is tried.
async function copyText(text, element) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(element);
    return document.execCommand("copy");
  }
}
