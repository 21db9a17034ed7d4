"""The journal: the durable state of a service.

``log``    one log of records in segments, which a thread appends (group commit) ``ledger`` the small part that is
queried, in SQLite; the same records, applied in order once they are durable ``finding`` opens what an earlier
incarnation left: ledger, end of the log, tokens

The log is the truth. A service always continues from a state that some prefix of the log describes.
"""
