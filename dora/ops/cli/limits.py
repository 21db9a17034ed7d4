"""Limits of a service that are not settings, for ``docs/reference/limits.md``."""

from collections.abc import Iterable, Iterator
from typing import Final

from dora.agents.front.gateway import CLOSED_MAX, FrontLimits
from dora.agents.front.replays import REPLAYS_MAX, REPLAYS_S
from dora.agents.front.request import CHOICES_MAX
from dora.agents.front.sessions import BRANCHES_MAX
from dora.core.rules.evaluation import EVALUATIONS_MAX, RESPONSES_MAX, SHARE_MAX
from dora.data.limits import (
    GROUP_SIZE_MAX,
    ID_CHARACTERS_MAX,
    SAMPLING_BYTES_MAX,
    TEXT_BYTES_MAX,
    WINDOW_REQUESTS_MAX,
)
from dora.data.verdict import COMPONENTS_MAX, LOG_MAX_BYTES, NAME_MAX_BYTES, REWARD_MAX
from dora.host.launcher import WORKERS_MAX as HOST_WORKERS_MAX
from dora.journal.log import BEHIND_BYTES
from dora.ops.page.browsers import BROWSERS
from dora.ops.page.viewers import VIEWERS
from dora.orchestrator.hosts.examinations import EXAMINED_S
from dora.orchestrator.hosts.fronts import FRONTS_MAX
from dora.orchestrator.hosts.hosts import HOSTS_MAX
from dora.orchestrator.rollout.evaluations import PROMPT_BYTES_MAX, UNREAD_BYTES_MAX
from dora.orchestrator.rollout.feed import REFUSED_MAX
from dora.orchestrator.rollout.prompt_ledger import QUEUED_BYTES_MAX
from dora.orchestrator.rollout.streams import COMMANDS_QUEUED_MAX
from dora.orchestrator.services.cancel import IDS_MAX
from dora.orchestrator.services.operator import WATCHES_MAX
from dora.orchestrator.services.trainer import METRICS_MAX, UPLOAD_SILENCE_S
from dora.orchestrator.services.worker import POOLS_MAX, WORKERS_MAX
from dora.prompts.jsonl import LINE_BYTES_MAX
from dora.prompts.store import PROMPTS_MAX
from dora.prompts.tables import CELL_BYTES_MAX
from dora.rewards.pool import LOG_BYTES
from dora.rpc.challenge import FRESH_S, SESSIONS_MAX
from dora.rpc.channel import CALLS_WAITING_MAX, CONNECTIONS_MAX, HANDSHAKE_S, IDLE_S
from dora.rpc.interceptor import (
    CALLS_AT_ONCE,
    COMMIT_BYTES,
    LARGE_AT_ONCE,
    LARGE_S,
    SMALL_BYTES,
    SMALL_S,
    TURN_BYTES,
    UPLOADS_AT_ONCE,
    WORKER_BYTES,
)
from dora.rpc.roles import Role
from dora.rpc.room import CALLS_MAX

REFUSED: Final = "refused"
WAITS: Final = "the next one waits"


def front_limits() -> Iterator[tuple[str, str, str]]:
    front = FrontLimits()
    yield "front: connections", f"{front.connections:,}", "503, closed"
    yield "front: requests in flight of one key or session", f"{front.in_flight:,}", "429"
    yield "front: body, and time until it has come", f"{front.body_bytes >> 20} MiB; {front.body_s:g} s", "413; 400"
    yield "front: messages of a chat; tools", f"{front.messages:,}; {front.tools:,}", "400"
    yield "front: sessions; branches of one", f"{front.sessions:,}; {BRANCHES_MAX:,}", "429"
    yield "front: choices of a request; prompts of one", f"{CHOICES_MAX}; {CHOICES_MAX}", "400"
    yield "front: time of a session without a call", f"{front.idle_s:g} s", "closed with the reward that it has"
    yield "front: requests that a retry finds; for how long", f"{REPLAYS_MAX:,}; {REPLAYS_S:g} s", "sampled anew"
    yield "front: browsers that follow its page; that have signed in", f"{VIEWERS}; {BROWSERS:,}", "503; signed out"
    yield "front: ended sessions that late calls are refused for", f"{CLOSED_MAX:,}", "the oldest is forgotten"


def limits() -> Iterator[tuple[str, str, str]]:
    """Yields the bounded thing, its bound, and the effect of exceeding it."""
    yield "connections", f"{CONNECTIONS_MAX:,}, or half of the process's limit of open files", "closed"
    yield "time of a connection without a call; until its first bytes", f"{IDLE_S:g} s; {HANDSHAKE_S:g} s", "closed"
    yield (
        "connections that have proved no token",
        "half of the free ones",
        "the oldest of the address that has most is closed",
    )
    yield "calls without a proof on a connection that has proved no token", f"{CALLS_MAX}", "the connection is closed"
    yield "calls that wait for an answer to begin", f"{CALLS_WAITING_MAX:,}", "cancelled: the client tries again"
    yield "time from a challenge to its first call; sessions", f"{FRESH_S:g} s; {SESSIONS_MAX:,}", "a new challenge"
    clients = (Role.TRAINER, Role.SUBMITTER, Role.OPERATOR)
    yield "open calls of trainers, submitters, operators", _numbers(CALLS_AT_ONCE[role] for role in clients), REFUSED
    machines = (Role.WORKER, Role.HOST)
    yield "open calls of workers, hosts", _numbers(CALLS_AT_ONCE[role] for role in machines), REFUSED
    yield "open watches", f"{WATCHES_MAX}", REFUSED
    yield "a message", _size(SMALL_BYTES), REFUSED
    yield "a commit; ids in one cancel", f"{_size(COMMIT_BYTES)}; {IDS_MAX:,} ids", REFUSED
    yield "a turn's message, with its given tokens", _size(TURN_BYTES), REFUSED
    yield "a worker's message", _size(WORKER_BYTES), REFUSED
    yield "prompts, or a chunk of an upload, in a message", "`service.max_message_bytes`", REFUSED
    yield "large messages processed at once, per service; uploads", f"{LARGE_AT_ONCE}; {UPLOADS_AT_ONCE}", WAITS
    yield "time to send a small message; a large message", f"{SMALL_S:g} s; {LARGE_S:g} s", "the call ends"
    yield "idle time of an upload", f"{UPLOAD_SILENCE_S:g} s", "the upload is removed"
    yield "examinations (`dora doctor --service`); time of a host's", f"1; {EXAMINED_S:g} s", f"{REFUSED}; no result"
    yield "fronts that Prometheus finds", f"{FRONTS_MAX:,}", REFUSED
    yield "hosts; workers per host", f"{HOSTS_MAX:,}; {HOST_WORKERS_MAX:,}", REFUSED
    yield "connected workers; pools", f"{WORKERS_MAX:,}; {POOLS_MAX:,}", REFUSED
    yield "queued commands of a worker", f"{COMMANDS_QUEUED_MAX:,}", "the worker is replaced"
    yield "requests in the window", f"{WINDOW_REQUESTS_MAX:,}", REFUSED
    yield "responses to a prompt", f"{GROUP_SIZE_MAX:,}", REFUSED
    yield "prompts of a file or dataset", f"{PROMPTS_MAX:,}", REFUSED
    yield "a line of a JSONL file; a JSON cell of a table", _sizes(LINE_BYTES_MAX, CELL_BYTES_MAX), REFUSED
    yield "queued prompts", f"`service.prompts_queued_max`; {_size(QUEUED_BYTES_MAX)}", REFUSED
    yield "a prompt's text; its `sampling`", _sizes(TEXT_BYTES_MAX, SAMPLING_BYTES_MAX), REFUSED
    yield "a prompt's `verifier` with its `answer`", "`prompts.verifier_kb`", REFUSED
    yield "the name of a prompt or task", f"{ID_CHARACTERS_MAX} characters", REFUSED
    yield "consecutive invalid prompts of a source", f"{REFUSED_MAX:,}", "the source fails"
    yield "evaluations; responses per evaluation", f"{EVALUATIONS_MAX}; {RESPONSES_MAX:,}", REFUSED
    yield "share of the workers allotted to all evaluations", f"{SHARE_MAX:g}", REFUSED
    yield "prompts of all evaluations", _size(PROMPT_BYTES_MAX), REFUSED
    yield "unread results of an evaluation", _size(UNREAD_BYTES_MAX), "the evaluation ends"
    yield "metrics of a commit", f"{METRICS_MAX}", REFUSED
    yield "responses waiting for a verdict", "`reward.queued_max`", WAITS
    yield "a reward, and that of a turn: its size", f"{REWARD_MAX:,.0f}", REFUSED
    yield "components of a verdict; their names", f"{COMPONENTS_MAX}; {NAME_MAX_BYTES} bytes", "left out; cut"
    yield "the log of a verdict; the output of a reward process", _sizes(LOG_MAX_BYTES, LOG_BYTES), "cut"
    yield (
        "memory, open files of a reward process; processes that it leaves; calls",
        "`reward.memory_mb`, `reward.open_files`; `reward.processes`; `reward.calls_max`",
        "its process is replaced",
    )
    yield "log records not yet on disk", _size(BEHIND_BYTES), "nothing is admitted"
    yield from front_limits()


def _numbers(each: Iterable[int]) -> str:
    return ", ".join(f"{number:,}" for number in each)


def _sizes(*each: int) -> str:
    return "; ".join(map(_size, each))


def _size(count_bytes: int) -> str:
    return f"{count_bytes >> 20:,} MiB" if count_bytes >= 1 << 20 else f"{count_bytes >> 10} KiB"
