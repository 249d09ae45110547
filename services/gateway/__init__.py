"""Serve HTTP and gRPC in front of Redis: requests in, tokens out.

Imports go down: main, app, kserve and dashboard, openai, gateway, admission and processes, delivery, http, metrics and
auth and tracing, cluster, text and progress, request, errors. import-linter checks it (pyproject.toml). A streamed chat
request runs functions of twelve modules; tests/integration/gateway/test_modules.py counts them.
"""
