"""Requests between Redis and the core: claimed, decoded, commanded, published."""
