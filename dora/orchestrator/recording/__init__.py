"""Storage state and the event log."""
