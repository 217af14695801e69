"""The common form of all APIs: requests as chats and generations for the engine, replies as one stream of events."""
