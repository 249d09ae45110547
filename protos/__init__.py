"""The contracts. `make protos` generates the modules beside this file; nothing else lives here."""
