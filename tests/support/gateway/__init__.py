"""A gateway under test: as a process over a real Redis, its clients, and its requests in this process."""
