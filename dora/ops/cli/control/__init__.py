"""Commands that look at a running service, or change it."""
