"""Tool calls: how models write them, and how their text is read while it arrives."""
