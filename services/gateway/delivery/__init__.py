"""Requests on their way to Redis and tokens on their way back, up to one request's stream."""
