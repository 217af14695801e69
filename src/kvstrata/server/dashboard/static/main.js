// Puts the page together: looks at the server once a second and hands what it says to those who show it.

import { Chat } from "./chat.js";
import { Conversations } from "./conversations.js";
import { byId } from "./dom.js";
import { Events } from "./events.js";
import { Explain } from "./explain.js";
import { showFigures } from "./figures.js";
import { History } from "./history.js";
import { Precision } from "./precision.js";
import { showReplicas } from "./replicas.js";
import { Requests } from "./requests.js";
import { showSequences } from "./sequences.js";
import { Sessions } from "./sessions.js";
import { KeyNeeded, forgetKey, get, hasKey, rememberKey } from "./server.js";
import { Speed } from "./speed.js";
import { Strata } from "./strata.js";

const EVERY_MS = 1000;

const history = new History();
const speed = new Speed(history);
const strata = new Strata(history, (view) => speed.show(view));
const events = new Events(history);
const requests = new Requests(history, onHistory);
const conversations = new Conversations(onError);
const precision = new Precision(onError);
const explain = new Explain(onError);
const chat = new Chat(onError);
const sessions = new Sessions();
const dialog = byId("key");
let timer = 0;

async function look() {
  clearTimeout(timer);
  const began = performance.now();
  const seen = await Promise.all([get("/cache/usage"), get("/props")]).catch((error) => error);
  if (seen instanceof KeyNeeded) return askForKey();
  timer = setTimeout(look, Math.max(100, EVERY_MS - (performance.now() - began)));
  if (seen instanceof Error) return say("lost", "no answer");
  const [usage, props] = seen;
  say("live", props.draining ? "draining" : "live");
  show(usage, props);
}

function show(usage, props) {
  byId("main").hidden = false;
  byId("model").textContent = `${props.model.name}, ${props.model.dtype}, ${props.model.context_tokens.toLocaleString("en-US")} tokens of context`;
  // A link cannot send the key.
  byId("links").hidden = hasKey();
  document.title = `kvstrata: ${props.model.name}`;
  history.add(usage, Date.now());
  showFigures(usage, props);
  strata.update(usage, props.model.name);
  showSequences(usage.sequences, props.state);
  showReplicas(usage, props);
  sessions.update();
  requests.update();
  conversations.update(usage, props);
  precision.showTarget(usage);
  chat.use(props);
}

function onHistory() {
  events.show();
  strata.draw();
}

function say(kind, words) {
  const status = byId("status");
  if (status.textContent === words) return;
  if (kind === "lost") events.add("lost", "The server does not answer.");
  status.className = `status ${kind}`;
  status.textContent = words;
}

function onError(error) {
  if (error instanceof KeyNeeded) askForKey();
}

function askForKey() {
  clearTimeout(timer);
  say("", "needs a key");
  byId("main").hidden = true;
  byId("key-wrong").textContent = hasKey() ? "That key was not accepted." : "";
  forgetKey();
  if (!dialog.open) dialog.showModal();
}

dialog.addEventListener("cancel", (event) => event.preventDefault());
dialog.querySelector("form").addEventListener("submit", (event) => {
  rememberKey(event.target.key.value);
  event.target.key.value = "";
  look();
});

look();
