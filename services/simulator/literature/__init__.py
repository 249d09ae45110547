"""`orcinus simulate --reproduce`: tables of the literature beside simulated ones."""
