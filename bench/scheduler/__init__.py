"""`orcinus bench scheduler`: the cost of an iteration of the scheduler."""
