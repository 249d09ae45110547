"""Code that at least two services use. Imports no service."""
