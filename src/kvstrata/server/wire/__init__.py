"""HTTP connections below the app: limits on what clients send and on how long they take."""
