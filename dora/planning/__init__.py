"""Capacity planning: how many accelerators generate and how many train, in which parallel configuration each.

Pure functions of numbers; nothing here touches a clock or a file. ``engine.py`` is the simulated engine: the planner
drains one to see how long a batch takes, and the simulator's workers have one each.
"""
