"""The journal: what a service must not lose, on disk.

``log``    one log of facts, in segments, appended by a thread of its own (group commit)
``ledger`` what is small and asked for, in SQLite; the same facts, applied in order after they are on disk
``finding`` what an earlier life of the service has left: ledger, end of the log, tokens

The log is the truth. What a service carries on with is always what a beginning of the log says.
"""
