"""Tokens, logprobs and turns of every live response."""
