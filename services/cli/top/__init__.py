"""`orcinus top`: the state of a stack in a terminal."""
