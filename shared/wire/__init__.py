"""Forms of what gateway, scheduler and worker exchange: packed columns, batches of tokens, and how a Run begins.

Imports protos/ and shared/errors.py only.
"""
