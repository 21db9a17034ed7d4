"""Packs responses to several prompts into one sequence, without padding; a prompt is read once for its responses.

    prompt A | response A0 | response A1 | prompt B | response B0 | ...

Position ids of a response continue those of its prompt. A response attends only to its prompt and itself, so the
logprobs are those of each row alone, up to rounding. Attention is computed block by block, so it costs as much as for
the separate rows, not the square of the sequence.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from dora.data.trajectory import Trajectory
from dora.errors import Conflict
from dora.trainers.router_replay import RouterReplay, rows_of, shared_prompt

ATTENTION: Final = "dora_packed"  # its name among transformers' implementations
LAYERS: Final = {"full_attention", "sliding_attention"}  # kinds of layers that mix tokens of a row by attention alone


@dataclass(frozen=True, slots=True)
class Block:
    """One prompt and its responses, by positions in the sequence."""

    prompt: slice
    responses: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Pack:
    """Some rows as one sequence of T tokens, n of which predict a response token."""

    input_ids: torch.Tensor  # (1, T), int64; a response's last token predicts nothing and is omitted
    position_ids: torch.Tensor  # (1, T), int64
    predicting: torch.Tensor  # (n,), int64: positions of the predicting tokens, row after row
    targets: torch.Tensor  # (n,), int64: the response tokens
    blocks: tuple[Block, ...]
    routed: torch.Tensor | None  # (T, layers, top_k), int32: recorded experts or router_replay.OWN; None: no record
    _masks: dict[tuple[int, int, int | None], torch.Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], device: torch.device | str) -> "Pack":
        """Packs rows. Those of one group and the same experts share their prompt. n runs over them in order."""
        groups: dict[tuple[str, bytes], list[int]] = {}
        for index, trajectory in enumerate(trajectories):
            groups.setdefault(shared_prompt(trajectory), []).append(index)
        rows = rows_of(trajectories)
        routed: list[Any] = []
        tokens: list[Any] = []
        positions: list[Any] = []
        predicting: dict[int, Any] = {}
        blocks = []
        at = 0
        for members in groups.values():
            prompt = trajectories[members[0]].prompt_token_ids
            start, at = at, at + len(prompt)
            prompt_end, responses = at, []
            if rows is not None:
                routed.append(rows[members[0]][: len(prompt)])
            tokens.append(prompt)
            positions.append(np.arange(len(prompt)))
            for index in members:
                response = trajectories[index].response_token_ids
                read = response[:-1]
                predicting[index] = np.append(prompt_end - 1, np.arange(at, at + len(read)))[: len(response)]
                tokens.append(read)
                positions.append(np.arange(len(prompt), len(prompt) + len(read)))
                if rows is not None:
                    routed.append(rows[index][len(prompt) : len(prompt) + len(read)])
                if len(read):
                    responses.append(slice(at, at + len(read)))
                at += len(read)
            blocks.append(Block(slice(start, prompt_end), tuple(responses)))
        return cls(
            _tensor(tokens, device)[None],
            _tensor(positions, device)[None],
            _tensor([predicting[index] for index in range(len(trajectories))], device),
            _tensor([each.response_token_ids for each in trajectories], device),
            tuple(blocks),
            None if rows is None else torch.from_numpy(np.concatenate(routed)).to(device),
        )

    def mask(self, queries: int, keys: int, window: int | None) -> torch.Tensor | None:
        """Marks the keys, (1, 1, queries, keys), to which the last ``queries`` tokens attend; None if purely causal.

        ``window`` limits how many tokens back, including the token itself. A mask is made once for all layers.
        """
        if window is not None and window >= keys:
            window = None
        if queries == keys and window is None:
            return None
        if (queries, keys, window) not in self._masks:
            device = self.input_ids.device
            back = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
            seen = (back >= 0) if window is None else (back >= 0) & (back < window)
            self._masks[queries, keys, window] = seen[None, None]
        return self._masks[queries, keys, window]


def packs(module: Any) -> bool:
    """Whether rows can be packed for ``module``: a model of transformers that mixes tokens by attention alone.

    State-space, convolution and chunked layers would mix tokens of different rows. Attention that requires the model's
    own implementation (with sinks, or with capped logits) cannot be replaced by SDPA.
    """
    config = getattr(module, "config", None)
    return (
        getattr(config, "_attn_implementation", None) in ("sdpa", ATTENTION)
        and bool(getattr(module, "_supports_attention_backend", False))
        and not getattr(module, "_is_stateful", False)
        and set(getattr(config, "layer_types", None) or ()) <= LAYERS
        and not getattr(config, "attention_chunk_size", None)
    )


def prepare(module: Any) -> None:
    """Enables ``module`` to accept packs. Without a pack its attention remains SDPA."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    module.set_attn_implementation(ATTENTION)


def packed_logprobs(
    module: Any, trajectories: Sequence[Trajectory], routers: RouterReplay | None = None
) -> torch.Tensor:
    """(n,): the raw model's log probability of every response token, row after row. Requires ``prepare(module)``.

    ``routers``, those of ``module``, use the recorded experts. If None, they choose.
    """
    pack = Pack.of(trajectories, next(module.parameters()).device)
    no_mask = torch.ones(1, 1, 0, 0, dtype=torch.bool, device=pack.input_ids.device)  # avoids a mask of T x T
    with nullcontext() if routers is None else routers.sending(pack.routed):
        logits = module(
            input_ids=pack.input_ids,
            position_ids=pack.position_ids,
            attention_mask=no_mask,
            logits_to_keep=pack.predicting,
            use_cache=False,
            pack=pack,
        ).logits[0]
    return -torch.nn.functional.cross_entropy(logits.float(), pack.targets, reduction="none")


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    pack: Pack | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Maps (1, heads, T, head size) to (1, T, heads, head size): transformers' SDPA, for each prompt and response."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if pack is None:
        if attention_mask is not None and not attention_mask.numel():
            why = "does not pass its forward arguments on to its attention"
            raise Conflict("model", type(module).__name__, "packing = False for this model", why)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, sliding_window=sliding_window, **others
        )
    parts = []
    for block in pack.blocks:
        prompt_key, prompt_value = key[:, :, block.prompt], value[:, :, block.prompt]
        for own in (block.prompt, *block.responses):
            keys, values = prompt_key, prompt_value
            if own is not block.prompt:
                keys = torch.cat([prompt_key, key[:, :, own]], dim=2)
                values = torch.cat([prompt_value, value[:, :, own]], dim=2)
            mask = pack.mask(own.stop - own.start, keys.shape[2], sliding_window)
            parts.append(sdpa_attention_forward(module, query[:, :, own], keys, values, mask, **others)[0])
    return torch.cat(parts, dim=1), None


def _tensor(parts: Sequence[Any], device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)
