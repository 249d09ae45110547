"""KV blocks of one replica: the pools of both tiers, the prefix cache, and what moves between the tiers."""
