"""Experiments for pages of docs/: each writes a result that its page shows."""
