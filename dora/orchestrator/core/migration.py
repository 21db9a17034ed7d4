"""How far a worker may be over-subscribed by moves."""

QUEUE_SLOTS = 2  # a worker holds at most this many times its slots
