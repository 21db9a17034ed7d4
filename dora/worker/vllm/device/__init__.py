"""The device port: everything in which an engine on a CPU differs from one on a GPU.

``port.py`` defines it without vLLM. ``cpu.py`` and ``cuda.py`` are its adapters, ``cpu_rank.py`` and ``cuda_rank.py``
their classes of vLLM's workers. No other module asks for the device's kind.
"""
