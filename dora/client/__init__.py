"""Clients of the service: a trainer's, one that submits prompts, an operator's. Loads no torch."""

from dora.client.operator import Operator
from dora.client.prompts import Cancelled, Prompts, Submitted
from dora.client.session import Attachment
from dora.client.step import Commit, Step
from dora.client.trainer import Trainer

__all__ = ["Attachment", "Cancelled", "Commit", "Operator", "Prompts", "Step", "Submitted", "Trainer"]
