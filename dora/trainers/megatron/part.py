"""One rank's part of the model and of its optimiser, and the passes that all ranks make together.

All ranks of a data-parallel shard get the same micro-batches, and all shards get equally many, as pipelines and experts
work in step. A micro-batch is a pack, as in a single process (:mod:`dora.trainers.packing`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dora.trainers.learner import LearnerConfig
from dora.trainers.megatron.architecture import Built
from dora.trainers.megatron.attention import spans_of
from dora.trainers.megatron.layout import group_of, own_device
from dora.trainers.megatron.routing import Routers
from dora.trainers.objectives.batch import Row
from dora.trainers.packing import Block, Pack

Rows = Sequence[Row]
OfRows = Callable[[Rows, torch.Tensor], torch.Tensor]  # maps the logprobs (n,) of some rows to a loss or a result


class Part:
    """One rank's model. Not thread-safe. All ranks call each method together."""

    def __init__(self, built: Built, config: LearnerConfig, *, distributed_optimizer: bool = False) -> None:
        """``built`` has its weights. ``distributed_optimizer`` shards optimiser states over data-parallel ranks."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.built = built
        self.distributed_optimizer = distributed_optimizer
        shared: dict[str, Any] = {"use_distributed_optimizer": distributed_optimizer}
        self._model = DistributedDataParallel(
            built.module.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, **shared), built.module
        )
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                clip_grad=config.grad_norm_max,
                bf16=built.dtype == torch.bfloat16,
                params_dtype=built.dtype,
                **shared,
            ),
            [self._model],
        )
        self.routers = Routers(built)
        self.forget()

    def accumulate(self, batches: Sequence[Rows], loss: OfRows) -> None:
        """Adds the gradients of ``loss``, a sum over a micro-batch's rows, which the last stage computes."""

        def of_rows(rows: Rows, logits: torch.Tensor, pack: Pack, own: slice) -> Any:
            value = loss(rows, self._logprobs(logits, pack, own))
            return value, torch.zeros((), dtype=torch.int, device=value.device), {}

        self._run(self._model, batches, of_rows, forward_only=False)

    def logprobs(self, batches: Sequence[Rows], built: Built | None = None) -> list[torch.Tensor]:
        """Returns (n,) of each micro-batch, as :func:`dora.trainers.packing.packed_logprobs`; on the last stage only.

        ``built`` may be another model with the same layout.
        """

        def of_rows(rows: Rows, logits: torch.Tensor, pack: Pack, own: slice) -> torch.Tensor:
            return self._logprobs(logits, pack, own).detach()

        module = (built or self.built).module
        with torch.no_grad():
            options = {"forward_only": True, "collect_non_loss_data": True}
            return self._run(module, batches, of_rows, **options)

    def logprobs_of(self, token_ids: tuple[int, ...]) -> list[float]:
        """Returns logprobs of each token of one text but the first, on the last stage only, without gradients."""

        def of_text(text: Pack, logits: torch.Tensor, pack: Pack, own: slice) -> torch.Tensor:
            return self._logprobs(logits, pack, own).detach()

        texts = [_text(token_ids, own_device())]
        with torch.no_grad():
            found = self._run(self.built.module, texts, of_text, forward_only=True, collect_non_loss_data=True)
        return found[0].tolist() if found else []

    def reduce(self, units: float) -> float:
        """Sums the gradients of all ranks and divides them by ``units``, the whole step's. Returns the norm."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self._model])
        self._model.scale_gradients(1.0 / units)
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def take_step(self) -> None:
        """Clips the reduced gradient and takes one optimiser step."""
        self._optimizer.step()

    def forget(self) -> None:
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def states(self) -> Iterator[tuple[str, Any, torch.Tensor]]:
        """Yields the name, the state (to be filled) and the tensor of each entry of this rank's optimiser.

        The tensor is a parameter, or its float32 copy.
        """
        chained = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        for number, optimizer in enumerate(each for each in chained if each.optimizer is not None):
            for group, settings in enumerate(optimizer.optimizer.param_groups):
                for index, tensor in enumerate(settings["params"]):
                    yield f"{number}.{group}.{index}", optimizer.optimizer.state[tensor], tensor

    def _run(self, module: Any, batches: Sequence[Any], of_batch: Any, **options: Any) -> list[Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        found: list[Any] = get_forward_backward_func()(
            forward_step_func=lambda iterator, stage: self._forward(next(iterator), stage, of_batch),
            data_iterator=iter(batches),
            model=[module],
            num_microbatches=len(batches),
            seq_length=1,  # the stages send each other the length of each pack
            micro_batch_size=1,
            **options,
        )
        return found

    def _forward(self, batch: Any, stage: Any, of_batch: Any) -> tuple[torch.Tensor, Any]:
        place, device = self.built.place, own_device()
        pack = batch if isinstance(batch, Pack) else Pack.of([row.trajectory for row in batch], device)
        unit = place.layout.tp * place.layout.cp
        tokens = -(-pack.input_ids.shape[1] // unit) * unit
        padding, share = (0, tokens - pack.input_ids.shape[1]), tokens // place.layout.cp
        own = slice(share * place.cp, share * (place.cp + 1))
        input_ids, positions = (
            torch.nn.functional.pad(each, padding)[:, own] for each in (pack.input_ids, pack.position_ids)
        )
        inner = stage.module if stage is self._model else stage
        inner.rotary_pos_emb.positions = positions[0]
        routed = pack.routed if inner is self.built.module else None  # a reference is another policy
        with self.routers.sending(routed, tokens, own):
            output = stage(input_ids, positions, spans_of(pack, tokens))

        def loss(logits: torch.Tensor, **others: Any) -> Any:
            return of_batch(batch, logits[0], pack, own)

        return output, loss

    def _logprobs(self, logits: torch.Tensor, pack: Pack, own: slice) -> torch.Tensor:
        """Returns (n,) of the response tokens, from this rank's part of the vocabulary at its positions of the pack."""
        from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region, vocab_parallel_cross_entropy

        here = (pack.predicting >= own.start) & (pack.predicting < own.stop)
        chosen = logits[pack.predicting[here] - own.start].float()
        beyond = self.built.architecture.vocab_size - self.built.place.tp * chosen.shape[1]
        if beyond < chosen.shape[1]:  # padding rows of the head predict nothing
            is_padding = torch.arange(chosen.shape[1], device=chosen.device) >= beyond
            chosen = chosen.masked_fill(is_padding, torch.finfo(chosen.dtype).min)
        if chosen.shape[0]:
            found = -vocab_parallel_cross_entropy(chosen[:, None], pack.targets[here][:, None])[:, 0]
        else:
            found = chosen.sum(dim=1)
        if self.built.place.layout.cp == 1:
            return found
        of_all = found.new_zeros(len(pack.targets)).masked_scatter(here, found)
        return reduce_from_tensor_model_parallel_region(of_all, group_of("cp"))


def _text(token_ids: tuple[int, ...], device: torch.device) -> Pack:
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=device)
    places = torch.arange(len(token_ids), device=device)
    block = Block(slice(0, len(token_ids)), ())
    return Pack(tokens[None], places[None], places[:-1], tokens[1:], (block,), routed=None)
