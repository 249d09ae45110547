"""KV blocks of one replica: the pools of both tiers, the prefix cache, and copies between the tiers."""
