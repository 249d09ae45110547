"""`orcinus chaos`: a stack under load and random faults, and a checker of every answer."""
