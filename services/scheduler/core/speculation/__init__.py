"""Speculation: the drafts of a step, the texts that they come from, and the search in these for the last tokens.

`drafts` imports `texts`, both import the slot table, which imports `ngrams`; that imports none of them.
"""
