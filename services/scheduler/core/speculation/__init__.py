"""Speculation: the drafts of a step and the texts that they come from.

`drafts` imports `texts`; both import the slot table and `ngrams`, which searches texts for the last tokens of a row.
"""
