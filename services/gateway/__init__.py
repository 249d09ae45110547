"""Serve HTTP and gRPC in front of Redis: requests in, tokens out.

Imports go down: main, app, kserve and dashboard, openai, gateway, delivery and processes, admission, http, metrics and
auth and tracing, cluster, text, request, errors. import-linter checks it (pyproject.toml).
"""
