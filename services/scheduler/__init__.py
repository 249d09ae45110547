"""The process around the core: requests in, steps out to workers, tokens into Redis."""
