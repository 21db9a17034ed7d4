"""The host tier: a process that keeps parked requests in its host's memory, and on a disk behind it."""
