"""The state table of a request's handoff, and the cheapest choice for a displaced request."""
