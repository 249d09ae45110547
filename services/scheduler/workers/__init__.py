"""The workers of a shard: their records in Redis, their links, and the loop that keeps each one busy."""
