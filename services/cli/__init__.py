"""The command `orcinus`. It knows every service and imports each only when its command runs."""
