"""Events between two statuses, as sentences: replaces the live view without a terminal."""

from dora.ops.view.evaluation import evaluated_line
from dora.ops.view.metrics import alarms, metrics
from dora.ops.view.service import drain_rows, faults_of, filling, sessions_idle
from dora.rpc.dora_pb2 import Status, StepMetrics

NEWS_PERIOD_S = 2.0  # minimum time between batches of lines
METRICS_TOLD = 4  # per commit; `dora status` shows all
SILENCE_PERIOD_S = 15.0  # time without events before a line of progress

COUNTED_EVENTS = {
    "migrations_kv": "requests migrated with their KV",
    "migrations_reprefill": "requests resumed by re-prefill",
    "migrations_failed": "handoffs undone",
    "groups_cancelled": "groups cancelled",
    "hosts_noticed": "hosts leave by a deadline",
    "c1_violations": "VIOLATIONS OF C1",
}


def news(before: Status, after: Status) -> list[str]:
    """Returns sentences on commits, workers and counted events between two statuses of one service."""
    known = {step.step for step in before.steps}
    new = [step for step in after.steps if step.step not in known and (not known or step.step > max(known))]
    lines = [
        f"step {step.step} committed: mean reward {step.mean_reward:.3f}, staleness mean {step.staleness_mean:.2f} "
        f"max {step.staleness_max}, {step.tokens:,} tokens{_metrics(step)}"
        for step in new
    ]
    if new and (turns := int(after.counters.get("turns_ended", 0) - before.counters.get("turns_ended", 0))):
        lines.append(f"turns of sessions ended: {turns:,}; {sessions_idle(after):,} sessions are in tool time")
    known = {each.version for each in before.evaluated}
    lines += [f"evaluated {evaluated_line(each)}" for each in after.evaluated if each.version not in known]
    lines += [f"ALARM: step {step.step}: {line}" for step in new for line in alarms(step.metrics)]
    lines += _version_news(before, after) + _worker_news(before, after)
    if faults_of(after) != faults_of(before):
        fault = faults_of(after)
        lines.append(f"storage fault: {fault}; no group is admitted" if fault else "storage has recovered")
    if after.drain.ended and (not before.drain.ended or bool(before.drain.waits_for) > bool(after.drain.waits_for)):
        lines.append(sign_of_progress(after))
    if after.prompts_failed and not before.prompts_failed:
        lines.append(f"the prompt source failed: {after.prompts_failed}")
    for name, what in COUNTED_EVENTS.items():
        more = int(after.counters.get(name, 0) - before.counters.get(name, 0))
        if more > 0:
            lines.append(f"{what}: {more}")
    return lines


def sign_of_progress(status: Status) -> str:
    """A sentence on a service without new events."""
    running = sum(worker.running for worker in status.workers)
    if rows := drain_rows(status):
        return "draining: " + "; ".join(f"{name}: {told}" for name, told in rows)
    return f"filling step {filling(status)}, {running} requests running"


class Narrator:
    """Turns a stream of statuses into lines, at most once per ``NEWS_PERIOD_S``."""

    def __init__(self) -> None:
        self._told = Status()
        self._looked_at_s = float("-inf")
        self._spoke_at_s = float("-inf")

    def tell(self, status: Status, now_s: float, *, last: bool = False) -> list[str]:
        """Returns the lines to print for ``status`` at ``now_s`` (any monotonic clock); often none, unless ``last``."""
        if now_s - self._looked_at_s < NEWS_PERIOD_S and not last:
            return []
        lines = news(self._told, status)
        if not lines and now_s - self._spoke_at_s >= SILENCE_PERIOD_S:
            lines = [sign_of_progress(status)]
        self._told.CopyFrom(status)
        self._looked_at_s = now_s
        if lines:
            self._spoke_at_s = now_s
        return lines


def _version_news(before: Status, after: Status) -> list[str]:
    earlier = {row.version: row.state for row in before.versions}
    lines = []
    for row in after.versions:
        was = earlier.get(row.version)
        if row.state == "rejected" and was != "rejected":
            lines.append(f"v{row.version} rejected ({row.reason}): its trainer must republish it")
        elif was == "rejected" and row.state != "rejected":
            lines.append(f"v{row.version} published anew")
    return lines


def _metrics(step: StepMetrics) -> str:
    return "".join(f", {name} {value}" for name, value in metrics(step.metrics)[:METRICS_TOLD])


def _worker_news(before: Status, after: Status) -> list[str]:
    earlier = {worker.worker_id: worker for worker in before.workers}
    lines = []
    for worker in after.workers:
        old = earlier.get(worker.worker_id)
        if worker.state == "lost" and (old is None or old.state != "lost"):
            lines.append(f"{worker.worker_id} lost: {worker.reason or 'no reason given'}")
        elif old is not None and worker.epoch > old.epoch:
            lines.append(f"{worker.worker_id} is back (epoch {worker.epoch})")
        elif worker.version >= 0 and (old is None or worker.version != old.version):
            lines.append(f"{worker.worker_id} now hosts v{worker.version}")
    return lines
