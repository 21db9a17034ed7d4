"""A host: the agent of one machine, which runs its worker processes, and what it holds for them."""
