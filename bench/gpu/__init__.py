"""`python -m bench.gpu`: everything that has to be measured on a GPU, in one bounded run."""
