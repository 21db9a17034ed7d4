"""The shared tier: whole chunks of KV that any worker of the run may find again, kept by LMCache's server.

``server`` is that server's process, ``wire`` speaks to it, ``chunks`` says what a chunk is and whether one is whole.
``tier`` is a worker's part: a thread that finds and keeps chunks. A tier that is slow, full or gone is a tier in which
nothing is found.
"""
