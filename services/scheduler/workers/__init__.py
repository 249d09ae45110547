"""The workers of a shard: found in Redis, dialled, kept busy, watched."""
