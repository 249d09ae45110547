"""How busy the stages of a pipeline are."""
