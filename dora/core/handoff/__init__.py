"""The handoff of a request as a table, and the cheapest choice for a request that is displaced."""
