"""The journal: the durable state of a service, as one log.

``log`` appends records to segments in a thread of its own (group commit); ``durable`` folds them into the small state,
whose checkpoints are in the log; ``content`` collects prompts, tokens and verdicts of what is live; ``finding`` opens
what an earlier incarnation left.

A service always continues from a state that some prefix of the log describes.
"""
