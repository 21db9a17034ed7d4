"""Storage faults and the event log."""
