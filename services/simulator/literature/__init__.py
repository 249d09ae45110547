"""`orcinus simulate --reproduce` and `--cases`: tables and cases of the literature beside simulated ones."""
