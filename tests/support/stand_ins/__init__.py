"""Stand-ins for a service, so that a test runs the others: a scheduler by script, workers without a model, the Hub."""
