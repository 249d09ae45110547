"""Requests between Redis and the core: intake, claims, commands, publisher, and the hand-over between shards."""
