"""Command lines of services, launcher and benches: options of settings or of arguments, and lines that count things.

`plurals` imports nothing and `arguments` the standard library alone: they also run where little is installed.
"""
