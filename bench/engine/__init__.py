"""`orcinus bench engine`: what one iteration costs the engine."""
