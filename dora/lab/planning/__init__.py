"""Capacity planning: how many accelerators generate and how many train, and the parallel configuration of each.

Pure functions of numbers, without a clock or files; only ``architecture.py`` reads a model's configuration. The
planner drains a simulated engine (``dora/lab/sim_engine/``) to compute how long a batch takes.
"""
