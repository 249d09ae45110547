"""Bring requests to Redis and tokens back, up to one request's stream of text."""
