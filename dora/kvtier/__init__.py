"""The shared tier: complete chunks of KV that any worker of the run can find, stored by LMCache's server.

``server`` is that server's process, ``wire`` is its protocol, ``chunks`` defines chunks and checks them. ``tier`` is a
worker's part: a thread that fetches and stores chunks. In a tier that is slow, full or down, nothing is found.
"""
