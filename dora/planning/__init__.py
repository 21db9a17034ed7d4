"""Capacity planning: how many accelerators generate and how many train, in which parallel configuration each.

Pure functions of numbers; nothing here touches an engine, a clock or a file.
"""
