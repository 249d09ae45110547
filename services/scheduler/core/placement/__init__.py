"""Placement: the replica that a sequence runs on. Constraints, price, roles, hand-over, and readable host tiers."""
