"""Router replay for Megatron's routers: uses the recorded experts, on any part of a pack that a rank has.

Source: megatron.core.transformer.moe.router_replay.RouterReplay, which :class:`Lead` replaces in a router, because it
does not support tokens without a record, such as padding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dora.trainers.megatron.architecture import Built
from dora.trainers.router_replay import OWN, choice


class Lead:
    """The choice of one router. ``routed`` (tokens, top_k) has the experts of this pass; if None, the router chooses.

    ``ties`` counts tokens whose last chosen and first other expert have logits within ``margin``, if set.
    """

    def __init__(self, *, in_logs: bool) -> None:
        """If ``in_logs``, scores are probabilities, whose logarithms differ as the logits do."""
        self.routed: torch.Tensor | None = None
        self.margin, self.ties, self._in_logs = 0.0, 0, in_logs

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns scores and indices (tokens, topk) of the chosen experts. Megatron calls it by this name."""
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.margin and topk < scores.shape[1]:
            largest = (scores.log() if self._in_logs else scores).topk(topk + 1, dim=1).values
            self.ties += int((largest[:, -2] - largest[:, -1] < self.margin).sum())
        if self.routed is None:
            return values, own
        indices = choice(self.routed, own)
        return scores.gather(1, indices), indices


class Routers:
    def __init__(self, built: Built) -> None:
        self._place, self._first = built.place, built.first_layer
        self._leads: list[Lead] = []
        self._shares_sequence = bool(built.module.config.sequence_parallel)
        if built.architecture.experts:
            for layer in built.module.decoder.layers:
                router = layer.mlp.router
                router.router_replay = lead = Lead(in_logs=router.config.moe_router_pre_softmax)
                self._leads.append(lead)

    @contextmanager
    def sending(self, routed: torch.Tensor | None, tokens: int, own: slice) -> Iterator[None]:
        """Prepares a forward pass over the positions ``own`` of a pack that is padded to ``tokens``.

        ``routed`` is the pack's, as in :class:`dora.trainers.packing.Pack`.
        """
        if routed is not None and self._leads:
            filled = torch.nn.functional.pad(routed, (0, 0, 0, 0, 0, tokens - len(routed)), value=OWN)[own]
            if self._shares_sequence:
                filled = filled.chunk(self._place.layout.tp)[self._place.tp]
            for index, lead in enumerate(self._leads, self._first):
                lead.routed = filled[:, index]
        try:
            yield
        finally:
            for lead in self._leads:
                lead.routed = None

    @contextmanager
    def watched(self, margin: float) -> Iterator[None]:
        """Counts, within the block, ties within ``margin``."""
        for lead in self._leads:
            lead.margin, lead.ties = margin, 0
        try:
            yield
        finally:
            for lead in self._leads:
                lead.margin = 0.0

    @property
    def ties(self) -> int:
        """The number of this rank's tokens, since :meth:`watched`, whose experts rounding may decide."""
        return sum(lead.ties for lead in self._leads)
