"""Serve connections: uvicorn's protocol with limits, TLS, middleware, listening sockets."""
