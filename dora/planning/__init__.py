"""Capacity planning: how many accelerators generate and how many train, and the parallel configuration of each.

Pure functions of numbers, without a clock or files. ``engine.py`` is the simulated engine: the planner drains one to
compute how long a batch takes, and each worker of the simulator has one.
"""
