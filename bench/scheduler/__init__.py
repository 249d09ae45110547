"""`orcinus bench scheduler`: what one iteration costs the scheduler."""
