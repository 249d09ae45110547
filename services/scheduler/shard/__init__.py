"""The shard as Redis shows it: its lease, and the other shards of the model. Imports nothing of the scheduler."""
