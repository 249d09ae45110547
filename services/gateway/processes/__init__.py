"""Several gateway processes behind one port, kept running by a parent."""
