"""The KV cache of a worker: its size, its host tier, and copies between tiers and peers."""
