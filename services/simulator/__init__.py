"""`orcinus simulate`: the scheduler's own core against a virtual clock. The way in is `engine.simulate`."""
