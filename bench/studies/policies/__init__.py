"""The measured tables of docs/policies.md."""
