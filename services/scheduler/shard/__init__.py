"""One shard among others: its lease, the other shards, requests handed over between them."""
