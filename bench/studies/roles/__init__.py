"""Prefill and decode replicas apart against the same number together."""
