"""The engine: vLLM, its blocks, requests and ranks, and the device port (``device/``)."""
