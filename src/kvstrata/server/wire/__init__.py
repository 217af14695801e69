"""Below the app: connections, what clients may send on them, and how long they may take."""
