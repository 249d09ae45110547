"""Separate prefill and decode replicas against the same number of combined ones."""
