"""The scheduler service around its core: it takes requests in, sends steps to workers and writes tokens to Redis.

Packages and modules, each of which imports only those before it: core (pure logic), shards (the other ones),
tracing, metrics, requests (intake, claims, publishing), quarantine, telemetry, policy_switch, workers (fleet, links),
service, main.
"""
