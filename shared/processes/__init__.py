"""Processes: child processes, the supervisor, limits on what a process may use, sockets that are held open."""
