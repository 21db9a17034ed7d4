"""Capacity planning: how many accelerators generate and how many train, and what an engine's step costs.

Pure functions of numbers; nothing here touches an engine, a clock or a file.
"""
