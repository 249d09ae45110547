"""Connections of the gateway: servers, protocol limits, middleware, listening sockets."""
