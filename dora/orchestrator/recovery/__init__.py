"""A service that starts again on its state folder, and the replay of its event log."""
