"""Measures, tables and plots of simulated runs."""
