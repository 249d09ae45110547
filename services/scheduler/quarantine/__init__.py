"""Requests that get no step for a while: suspected of killing a worker, or without a gateway."""
