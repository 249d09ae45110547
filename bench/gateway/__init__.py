"""`orcinus bench gateway`: the token rate of one gateway process on one core."""
