// The chat as this tab keeps it, so that a reload loses nothing. It ends with the tab, as the key does.

const PLACE = "kvstrata.chat";

export const keep = (chat) => {
  try {
    sessionStorage.setItem(PLACE, JSON.stringify(chat));
  } catch {
    // Some megabytes are all that a tab may keep. The chat goes on without.
    sessionStorage.removeItem(PLACE);
  }
};

export const forget = () => sessionStorage.removeItem(PLACE);

// {settings, turns}; empty where nothing is kept, or nothing that this version of the page understands.
export function kept() {
  try {
    const chat = JSON.parse(sessionStorage.getItem(PLACE)) ?? {};
    const turns = Array.isArray(chat.turns) ? chat.turns.filter(isTurn) : [];
    return { settings: chat.settings ?? {}, turns };
  } catch {
    return { settings: {}, turns: [] };
  }
}

const isTurn = (turn) => ["user", "assistant"].includes(turn?.role) && typeof turn.content === "string";
