"""A replica of several processes: ranks, how they start, and what they tell each other."""
