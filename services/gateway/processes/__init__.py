"""Run several gateway processes behind one port, with a parent that restarts them."""
