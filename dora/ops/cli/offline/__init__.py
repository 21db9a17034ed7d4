"""Commands that need no service."""
