"""`orcinus bench kernels`: every operation of the forward pass beside the machine's limits."""
