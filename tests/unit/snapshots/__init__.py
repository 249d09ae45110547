"""Snapshots of what users see: HTTP, gRPC, Redis keys, command line, make targets, metrics, settings.

surfaces.py renders each from the code, test_snapshots.py compares it with the file beside it, and
`python -m tests.unit.snapshots.record` writes the files anew.
"""
