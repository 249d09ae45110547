"""The scheduler's process around its core: requests in, steps out to workers, tokens into Redis.

Imports go one way: core, tasks, shard, requests, tracing, metrics, telemetry, quarantine, workers, service, main.
"""
