"""Command lines of services, launcher and benches: options of settings or of arguments.

`arguments` imports the standard library alone: it also runs where little is installed.
"""
