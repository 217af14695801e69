"""The common form of all APIs: requests as conversations and jobs for the engine, replies as one stream of events."""
