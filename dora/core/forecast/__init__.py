"""Estimates for decisions: lengths, rates, step costs, window sizes."""
