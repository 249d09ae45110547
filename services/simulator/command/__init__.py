"""`orcinus simulate`: options, runs, searches, tables and plots. Nothing outside this package imports it."""
