"""`python -m bench.gpu`: all measurements on a GPU, in one bounded run."""
