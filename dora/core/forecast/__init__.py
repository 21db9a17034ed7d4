"""Estimates that decisions rest on: lengths, rates, step costs, window sizes."""
