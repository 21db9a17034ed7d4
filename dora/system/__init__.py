"""Processes, files and memory of the operating system."""
