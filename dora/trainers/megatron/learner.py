"""The learner on Megatron's ranks: the counterpart of :class:`dora.trainers.learner.Learner` for transformers' models.

The leader is used as if it were alone, and sends orders to the others, which run :meth:`MegatronLearner.follow`.
"""

import json
import math
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from dora.data.trajectory import TrajectoryGroup
from dora.data.types import Canary
from dora.errors import InvalidValue
from dora.trainers.checkpoint import CheckpointPosition, written
from dora.trainers.checks import check_group, check_step
from dora.trainers.learner import LearnerConfig, StepMetrics, StepSums
from dora.trainers.megatron.architecture import Built
from dora.trainers.megatron.dealing import batches_from_bytes, batches_to_bytes, deal
from dora.trainers.megatron.part import Part, Rows
from dora.trainers.megatron.state import save_states
from dora.trainers.megatron.weights import prints_of, write, write_index
from dora.trainers.movement import Probe, probed
from dora.trainers.objectives.batch import Row, TokenBatch, without_routing
from dora.trainers.ranks import Order, Ranks, RanksDisagree
from dora.trainers.router_replay import check_routing
from dora.trainers.signals import added, over_ranks, token_sums, whole
from dora.weights.canary import TIE, least_tied
from dora.weights.reference import TensorHeader

_TURN: Final = 4  # micro-batches at once per pipeline stage, so the stages are busy most of the time


class MegatronLearner:
    """One rank's part. Not thread-safe, except for :meth:`add_group`."""

    def __init__(
        self,
        part: Part,
        config: LearnerConfig,
        ranks: Ranks,
        *,
        step: int = 0,
        reference: Built | None = None,
        reference_version: int = 0,
        dtypes: dict[str, str] | None = None,
        scratch: str = "",
    ) -> None:
        """``reference`` is the model of the KL term, of ``reference_version``. ``step`` is the first step to train.
        ``dtypes`` are of published tensors, by name, if they differ from the trainer's own. ``scratch`` is a folder
        visible to all ranks for a version's files, by default the system's.
        """
        self.part = part
        self.step = step
        self.busy_s = 0.0
        self._config, self._ranks, self._reference = config, ranks, reference
        self._reference_version = reference_version if config.objective.needs_reference else None
        self._dtypes, self._scratch = dtypes or {}, scratch or None
        self._exported: tempfile.TemporaryDirectory[str] | None = None
        self._shards = [json.loads(each) for each in ranks.gather(json.dumps(part.built.place.dp).encode())]
        # At most a step's groups and replays, with their arrival times; a replay has none.
        self._come: deque[tuple[TrajectoryGroup, float | None]] = deque()
        self._sums = StepSums()
        self._probed: Rows = ()  # of the shard's latest micro-batch
        self._probe: Probe | None = None  # the same rows, on the last stage

    def add_group(self, group: TrajectoryGroup, *, is_replay: bool = False) -> None:
        """Does the same as :meth:`dora.trainers.learner.Learner.add_group`."""
        architecture = self.part.built.architecture
        check_group(group, architecture.vocab_size, self._reference_version)
        if self._config.router_replay:
            for trajectory in group.trajectories:
                check_routing(trajectory, architecture.routing)
        self._come.append((group, None if is_replay else time.time()))

    def work(self) -> None:
        """Adds the undivided gradients of all queued groups, including those that arrive meanwhile."""
        began_s = time.monotonic()
        rows: list[Row] = []
        while self._come:
            group, taken_at = self._come.popleft()
            found = self._sums.take(group, taken_at, self._config.objective)
            rows.extend(found if self._config.router_replay else map(without_routing, found))
            if not self._come and rows:
                self._deal(rows)
                rows = []
        self.busy_s += time.monotonic() - began_s

    def _deal(self, rows: list[Row]) -> None:
        dealt = deal(rows, max(self._shards) + 1, self._config.micro_batch_tokens)
        turn = _TURN * self.part.built.place.layout.pp
        for first in range(0, len(dealt[0]), turn):
            batches = [each[first : first + turn] for each in dealt]
            parts = [batches_to_bytes(each) for each in batches]
            self._ranks.tell("work", [parts[shard] for shard in self._shards])
            self._work_on(batches[self._shards[0]])

    def _work_on(self, batches: Sequence[Rows]) -> None:
        reference: dict[int, torch.Tensor] = {}
        if self._reference is not None:
            found = self.part.logprobs(batches, self._reference)
            reference = {id(rows): each for rows, each in zip(batches, found, strict=False)}

        def loss(rows: Rows, logprobs: torch.Tensor) -> torch.Tensor:
            batch = TokenBatch.of(rows, logprobs, reference=reference.get(id(rows)))
            terms = self._config.objective.terms(batch)
            value, units = self._config.objective.sum(batch, terms)
            if rows is batches[-1]:
                self._probe = Probe.of(rows, logprobs)
            if self.part.built.place.speaks:
                self._sums.loss += float(value.detach())
                self._sums.units += units
                staleness = [row.trajectory.staleness for row in rows]
                self._sums.signals = added(self._sums.signals, token_sums(batch, terms.clipped, staleness))
            return value

        self.part.accumulate(batches, loss)
        self._probed = probed(batches[-1])

    def finish_step(self) -> StepMetrics:
        """Works off the queue, and takes one optimiser step. Begins a new step.

        Raises InvalidValue, with unchanged weights, if loss or gradient are not finite; RanksDisagree if the ranks
        differ in the step or its result, or if copies of the same weights differ.
        """
        self.work()
        self._ranks.tell("finish")
        return self._finish()

    def _finish(self) -> StepMetrics:
        sums, self._sums = self._sums, StepSums()
        loss, units = self._ranks.sum(np.array([sums.loss, sums.units])).tolist()
        by_staleness = over_ranks(sums.signals, self._ranks)
        tokens = whole(by_staleness).tokens_trained
        units = max(units, 1.0)  # a step without a learning signal has a gradient of zero
        norm = self.part.reduce(units)
        self._ranks.agree({"step": self.step, "loss": loss, "grad_norm": norm, "tokens": tokens})
        movement = math.nan
        try:
            check_step(loss, norm)
            if tokens:
                self.part.take_step()
                movement = self._movement()
        finally:
            self.part.forget()
            self._probed, self._probe = (), None
        self._compare_copies()
        self.step += 1
        return sums.metrics(loss / units, norm, by_staleness, self._config.clip_alarm, movement)

    def _movement(self) -> float:
        moved, tokens = 0.0, 0
        found = self.part.logprobs([self._probed])
        if self._probe is not None and self.part.built.place.speaks:
            moved, tokens = self._probe.moved(found[0])
        moved, tokens = self._ranks.sum(np.array([moved, tokens])).tolist()
        return moved / tokens if tokens else math.nan

    def _compare_copies(self) -> None:
        """Compares the copies of weights on data-parallel ranks. Raises RanksDisagree if they differ."""
        said: dict[str, tuple[int, float]] = {}
        for rank, answer in enumerate(self._ranks.gather(json.dumps(prints_of(self.part.built)).encode())):
            for name, value in json.loads(answer).items():
                first, known = said.setdefault(name, (rank, value))
                if not math.isclose(known, value, rel_tol=1e-6):
                    raise RanksDisagree(
                        f"the ranks disagree on the weights {name}: rank {first} has a squared norm of {known:.9g}, "
                        f"rank {rank} has {value:.9g}; nothing is committed"
                    )

    def weights(self) -> list[Path]:
        """Returns the argument of a commit: the ranks' files, by Hugging Face names, until the next call."""
        if self._exported is not None:
            self._exported.cleanup()
        self._exported = tempfile.TemporaryDirectory(prefix="dora-megatron-", dir=self._scratch)
        return self._export(Path(self._exported.name), published=True)

    def canary(self) -> Canary | None:
        """Returns the canary, computed by the ranks, or None if :meth:`weights` rounds to another dtype."""
        own = "BF16" if self.part.built.dtype == torch.bfloat16 else "F32"
        if not set(self._dtypes.values()) <= {own}:
            return None
        self._ranks.tell("canary")
        return self._canary()

    def _canary(self) -> Canary:
        built, routers = self.part.built, self.part.routers

        def run(token_ids: tuple[int, ...]) -> tuple[Canary, int]:
            with routers.watched(TIE):
                own = self.part.logprobs_of(token_ids)
            said = [json.loads(each) for each in self._ranks.gather(json.dumps([own, routers.ties]).encode())]
            found = next(logprobs for logprobs, _ in said if logprobs)
            return Canary(token_ids, tuple(found)), sum(ties for _, ties in said)

        return least_tied(run, built.architecture.vocab_size, built.architecture.config["max_position_embeddings"])

    def save(self, folder: Path, reference_version: int, weights: Any, replay: bytes = b"") -> None:
        """Writes a checkpoint; every rank writes its own files: the weights, and the optimiser's states."""
        built = self.part.built
        with written(folder, CheckpointPosition(self.step, reference_version), replay) as unfinished:
            self._export(unfinished, published=False)
            self._ranks.tell("save", [str(unfinished).encode()] * self._ranks.count)
            self._save(unfinished)
            for file in built.architecture.folder.iterdir():
                if file.suffix in (".json", ".jinja") and not (unfinished / file.name).exists():
                    shutil.copyfile(file, unfinished / file.name)

    def _export(self, folder: Path, *, published: bool) -> list[Path]:
        dtypes = self._dtypes if published else {}
        order = json.dumps({"folder": str(folder), "dtypes": dtypes}).encode()
        self._ranks.tell("export", [order] * self._ranks.count)
        files = self._write(folder, dtypes)
        write_index(folder, files)
        return [folder / name for name in sorted(set(files.values()))]

    def _write(self, folder: Path, dtypes: dict[str, str]) -> dict[str, str]:
        if not folder.is_dir():
            raise InvalidValue("--scratch", str(folder), "a folder visible to all ranks")
        expected = {name: TensorHeader(name, dtype, ()) for name, dtype in dtypes.items()}
        file, tensors = write(self.part.built, folder, expected)
        found: dict[str, str] = {}
        for answer in self._ranks.gather(json.dumps(dict.fromkeys(tensors, file)).encode()):
            found |= json.loads(answer)
        return found

    def _save(self, folder: Path) -> None:
        save_states(self.part, folder)
        self._ranks.agree({"step": self.step})  # waits until all ranks have written

    def follow(self) -> None:
        self._ranks.follow(self._obey)

    def _obey(self, order: Order) -> None:
        match order.name:
            case "work":
                self._work_on(batches_from_bytes(order.content))
            case "finish":
                self._finish()
            case "export":
                target = json.loads(order.content)
                self._write(Path(target["folder"]), target["dtypes"])
            case "canary":
                self._canary()
            case "save":
                self._save(Path(order.content.decode()))
            case other:
                raise InvalidValue("order", other, "known to this rank: check that all ranks run the same version")
