"""The KV cache of a worker: its size (`cache`), its host tier, and the transfers between tiers and from peers."""
