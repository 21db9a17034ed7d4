"""The fault sweep: the core and the service's own parts in an unreliable world, from a seed."""
