"""`orcinus bench serve`: load a running server and measure what its clients get."""
