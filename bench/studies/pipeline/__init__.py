"""Utilisation of the stages of a pipeline."""
