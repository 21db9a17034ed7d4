"""Hosts, their worker counts, and the distribution of weights to them."""
