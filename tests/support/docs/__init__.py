"""Check and write pages: code blocks, and the answers to bad requests and calls."""
