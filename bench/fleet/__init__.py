"""`orcinus fleet`: up to a thousand replicas on a virtual clock, by a coarser model."""
