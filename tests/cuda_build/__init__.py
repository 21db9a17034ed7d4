"""DORA against vLLM's CUDA build, on a machine without a GPU: ``make check-cuda``.

The build's Python sources lie in a folder of their own, without compiled objects, before the environment's vLLM on the
path. ``stand_in`` takes the place of what is compiled and of the driver. Nothing of a model runs.
"""
