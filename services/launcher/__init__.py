"""`orcinus up`: starts Redis and the services on one machine, keeps them running, stops them in order."""
