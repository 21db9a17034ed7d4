"""What DORA changes in vLLM: one declared, version-checked patch a file, proven at every engine start.

A patch says which vLLM it is written for, why it is needed, and how it shows that it took. ``registry`` applies all of
them before the engine is made and verifies all of them on the engine that was made.
"""
