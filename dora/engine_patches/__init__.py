"""Patches to vLLM: one file a patch, each version-checked and verified at every engine start.

A patch declares its vLLM range, its reason and a verification. ``registry`` applies all patches before the engine is
created and verifies them on the created engine.
"""
