"""The effect of guessed tokens on real texts (`python -m bench.studies.speculation`)."""
