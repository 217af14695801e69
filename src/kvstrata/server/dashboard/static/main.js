// Entry point of the page: polls the server once a second and passes the answers to the panels.

import { EventList, History, RequestTable } from "./activity.js";
import { MemoryChart, SpeedCharts, showFigures } from "./charts.js";
import { Chat } from "./chat.js";
import { ConversationList } from "./conversations.js";
import { byId } from "./dom.js";
import { PrecisionForm } from "./precision.js";
import { showReplicas, showSequences } from "./running.js";
import { KeyRequired, forgetKey, get, hasKey, rememberKey } from "./server.js";
import { ExplainForm, SessionTable } from "./sessions.js";

const POLL_MS = 1000;

const history = new History();
const speedCharts = new SpeedCharts(history);
const memoryChart = new MemoryChart(history, (view) => speedCharts.show(view));
const events = new EventList(history);
const requests = new RequestTable(history, onHistory);
const conversations = new ConversationList(onError);
const precision = new PrecisionForm(onError);
const chat = new Chat(onError);
const sessions = new SessionTable();
const keyDialog = byId("key");
let timer = 0;

async function poll() {
  clearTimeout(timer);
  const start = performance.now();
  const answers = await Promise.all([get("/cache/usage"), get("/props")]).catch((error) => error);
  if (answers instanceof KeyRequired) return askForKey();
  timer = setTimeout(poll, Math.max(100, POLL_MS - (performance.now() - start)));
  if (answers instanceof Error) return showStatus("lost", "no answer");
  const [usage, props] = answers;
  showStatus("live", props.draining ? "draining" : "live");
  show(usage, props);
}

function show(usage, props) {
  byId("main").hidden = false;
  byId("model").textContent = `${props.model.name}, ${props.model.dtype}, ${props.model.context_tokens.toLocaleString("en-US")} tokens of context`;
  // A link cannot send the key.
  byId("links").hidden = hasKey();
  document.title = `kvstrata: ${props.model.name}`;
  history.addSample(usage, Date.now());
  showFigures(usage, props);
  memoryChart.update(usage, props.model.name);
  showSequences(usage.sequences, props.state);
  showReplicas(usage, props);
  sessions.update();
  requests.update();
  conversations.update(usage, props);
  precision.showTarget(usage);
  chat.update(props);
}

function onHistory() {
  events.show();
  memoryChart.draw();
}

function showStatus(kind, text) {
  const status = byId("status");
  if (status.textContent === text) return;
  if (kind === "lost") events.addPageEvent("lost", "The server does not answer.");
  status.className = `status ${kind}`;
  status.textContent = text;
}

function onError(error) {
  if (error instanceof KeyRequired) askForKey();
}

function askForKey() {
  clearTimeout(timer);
  showStatus("", "needs a key");
  byId("main").hidden = true;
  byId("key-wrong").textContent = hasKey() ? "That key was not accepted." : "";
  forgetKey();
  if (!keyDialog.open) keyDialog.showModal();
}

keyDialog.addEventListener("cancel", (event) => event.preventDefault());
keyDialog.querySelector("form").addEventListener("submit", (event) => {
  rememberKey(event.target.key.value);
  event.target.key.value = "";
  poll();
});

new ExplainForm(onError);
poll();
