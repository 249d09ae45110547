"""What operators see of a running stack: logs, metrics, traces, and the view of all services that Redis holds."""
