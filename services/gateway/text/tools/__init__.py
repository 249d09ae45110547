"""Describe how models write tool calls, and read calls from text while it arrives."""
