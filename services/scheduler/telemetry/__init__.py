"""What the scheduler reports of itself: stats, heartbeat, events, recent iterations."""
