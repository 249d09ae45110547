"""Speculation: the drafts of a step, and the search for what followed the last tokens of a sequence before.

`drafts` imports the slot table and the step-time model; the slot table imports `ngrams`, which imports neither.
"""
