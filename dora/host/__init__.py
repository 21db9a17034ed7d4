"""The agent of one machine, its worker processes and its copies of model and weights."""
