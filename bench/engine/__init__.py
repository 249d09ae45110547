"""`orcinus bench engine`: the cost of an iteration of the engine."""
