"""`orcinus bench replicas`: one scheduler with several replicas."""
