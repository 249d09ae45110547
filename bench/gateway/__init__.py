"""`orcinus bench gateway`: what one gateway process streams on one core."""
