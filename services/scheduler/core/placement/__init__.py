"""Which replica a sequence runs on: eligibility, price, roles, and whose host tier a replica can read."""
