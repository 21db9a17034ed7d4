"""Functions over the core's state, one module a subject. The scheduler and the machine call them."""
