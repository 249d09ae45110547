"""`orcinus bench serve`: load on a running server, and what its clients saw."""
