"""Clients of the service: for trainers, for submitting prompts, and for operators. Loads no torch."""

from dora.client.all_ranks import AllRanks
from dora.client.evaluation import Evaluation
from dora.client.operator import Operator
from dora.client.periodic import EvaluationSeries
from dora.client.prompts import Cancelled, Prompts, Submitted
from dora.client.publishing import Commit
from dora.client.replay import ReplayBuffer
from dora.client.session import Attachment
from dora.client.sessions import Sessions
from dora.client.step import Step
from dora.client.trainer import Trainer
from dora.data.score import Score, score_of, scores_by

__all__ = [
    "AllRanks",
    "Attachment",
    "Cancelled",
    "Commit",
    "Evaluation",
    "EvaluationSeries",
    "Operator",
    "Prompts",
    "ReplayBuffer",
    "Score",
    "Sessions",
    "Step",
    "Submitted",
    "Trainer",
    "score_of",
    "scores_by",
]
