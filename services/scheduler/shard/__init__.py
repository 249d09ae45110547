"""The other shards of the model, as Redis shows them. Imports nothing of the scheduler."""
