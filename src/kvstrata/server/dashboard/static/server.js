// Client of the server that this page came from. The API key is kept in this tab's session storage and nowhere else.

const KEY = "kvstrata.key";
const TIER_NAMES = { hot: "memory", disk: "disk", remote: "shared store" };
const TIER_PLACES = { hot: "in memory", disk: "on the disk", remote: "in the shared store" };

export class KeyRequired extends Error {}

export const rememberKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);
export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const tierName = (tier) => TIER_NAMES[tier] ?? tier;
export const inTier = (tier) => TIER_PLACES[tier] ?? `in ${tier}`;

export async function request(method, path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key !== null) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const options = { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) };
  const response = await fetch(path, options);
  if (response.status === 401) throw new KeyRequired("This server requires an API key.");
  if (!response.ok) throw new Error(await errorMessage(response));
  return response;
}

export const get = async (path) => (await request("GET", path)).json();
export const post = async (path, body) => (await request("POST", path, body)).json();
export const remove = async (path) => (await request("DELETE", path)).json();

async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

// Server-sent events: yields {data} for events and {comment} for lines that only keep the connection alive.
export async function* streamEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ")) yield { data: line.slice(6) };
      else if (line.startsWith(": ")) yield { comment: line.slice(2) };
    }
  }
}
