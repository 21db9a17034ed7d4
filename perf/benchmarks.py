"""The benchmarks that ``python -m perf.all`` runs, and the figures of docs/performance.md that each of them measures.

``python -m perf.peers`` is not among them: it has a page of its own, docs/peers.md, and takes as long as all of these.
"""

from dataclasses import dataclass
from typing import Final

SERVICE: Final = ("dora/orchestrator", "dora/core", "dora/journal", "dora/rpc")
HOSTS: Final = ("dora/core", "dora/host", "dora/cluster", "dora/orchestrator/hosts")
KV: Final = ("dora/kvtransfer", "dora/system")
ENGINE: Final = ("dora/worker", "dora/engine_patches")
FRONT: Final = ("dora/agents/front", "dora/agents/chat")


@dataclass(frozen=True)
class Figure:
    """A row of the table. ``field``: its place in the benchmark's JSON, keys and indices with dots between them.
    ``bar``: an operator and a number, or empty. ``form``: a format, with a unit behind a blank.
    """

    title: str
    field: str
    bar: str = ""
    form: str = ".2f"


@dataclass(frozen=True)
class Benchmark:
    """``command``: arguments of Python that make it print JSON. ``short``: more of them, of the short form.
    ``measures``: paths whose changes make its figures old. ``needs``: a file without which it cannot run.
    """

    name: str
    command: str
    short: str
    measures: tuple[str, ...]
    figures: tuple[Figure, ...]
    needs: str = ""


BENCHMARKS: Final = (
    Benchmark(
        "journal",
        "-m perf.journal --json",
        "--requests 4096",
        ("dora/journal", "dora/orchestrator/recovery", "dora/core"),
        (
            Figure("log, bytes per second over a bare loop of appends", "journal_vs_raw_fsync", ">= 0.85"),
            Figure("restart with 131,072 requests in flight", "restart_s", "<= 1.3", ".1f s"),
        ),
    ),
    Benchmark(
        "planner",
        "perf/planner.py --only --policy laxity --json",
        "--workers 64 --requests 8192 --plans 10",
        ("dora/core",),
        (
            Figure("plan for 1,024 workers, p99", "0.plan_p99_ms", "<= 20", ".1f ms"),
            Figure("admissions of groups of 16 per second", "0.admitted_groups_per_s", ">= 20000", ",.0f"),
        ),
    ),
    Benchmark(
        "fleet_size",
        "perf/fleet_size.py --json",
        "--phase-s 300 --most 3",
        ("dora/core", "dora/lab/sim"),
        (
            Figure("advised number of workers, worker time over an oracle's", "worker_time_of_oracle", "<= 1.15"),
            Figure("the same, step time over the best fixed number's", "step_time_of_best_fixed", "<= 1.05"),
        ),
    ),
    Benchmark(
        "fleet",
        "-m dora simulate --preset fleet-1024 --policy laxity --steps 24 --warmup 0 --json",
        "--preset dora-64 --steps 4",
        ("dora/core", "dora/lab/sim", "dora/lab/sim_engine"),
        (Figure("simulation of 1,024 workers, speed-up", "sim_speedup", ">= 1000", ",.0f"),),
    ),
    Benchmark(
        "cluster",
        "perf/cluster.py --only notice spot --json",
        "--hours 0.25",
        ("dora/core", "dora/lab/sim", "dora/lab/sim_engine"),
        (
            Figure("KV that leaves a machine within 30 s, at 10 GB/s", "notice.moved_share", ">= 0.95", ".1%"),
            Figure("of that, computed again", "notice.moved_and_computed_again_gb", "<= 0", ".1f GB"),
            Figure("step with a machine taken every 60 s, beside undisturbed", "spot.spot_over_owned", "<= 1.1", ".3f"),
        ),
    ),
    Benchmark(
        "join",
        "perf/cluster.py --only join --json",
        "--hosts 8",
        ("dora/host", "dora/orchestrator/hosts", "dora/rpc"),
        (
            Figure("64 hosts join a service", "join.joined_s", "<= 10", ".1f s"),
            Figure("of that, processor time of the service", "join.service_cpu_s", "", ".2f s"),
            Figure("16 hosts fall silent: until the service knows", "join.silent_known_s", "<= 5", ".1f s"),
        ),
    ),
    Benchmark(
        "kinds",
        "perf/cluster.py --only kinds --json",
        "--steps 1",
        ("dora/core", "dora/lab/sim", "dora/lab/sim_engine"),
        (
            Figure(
                "step on two kinds in two zones, beside bubble-free", "kinds.both_over_bubble_free", "<= 1.05", ".3f"
            ),
            Figure("the same, placed at random", "kinds.at_random_over_bubble_free", "", ".3f"),
            Figure("the faster kind alone, beside its own", "kinds.H800_alone_over_bubble_free", "", ".3f"),
            Figure("the slower kind alone, beside its own", "kinds.A100_alone_over_bubble_free", "", ".3f"),
        ),
    ),
    Benchmark(
        "spot",
        "perf/cluster.py --only slurm --spot-minutes 4 --json",
        "--spot-minutes 1 --nodes 3",
        HOSTS,
        (
            Figure(
                "step while Slurm takes a node every 60 s, beside undisturbed",
                "slurm.spot_over_undisturbed",
                "<= 1.1",
                ".3f",
            ),
            Figure("of that, groups lost or doubled", "slurm.lost_or_doubled", "<= 0", ".0f"),
        ),
        ".slurm-build/usr/sbin/slurmd-wlm",
    ),
    Benchmark(
        "spot-ray",
        "perf/cluster.py --only ray --nodes 16 --spot-minutes 4 --json",
        "--spot-minutes 1 --nodes 3",
        HOSTS,
        (
            Figure(
                "step while Ray takes a node every 60 s, beside undisturbed",
                "ray.spot_over_undisturbed",
                "<= 1.1",
                ".3f",
            ),
            Figure("groups lost or doubled meanwhile", "ray.lost_or_doubled", "<= 0", ".0f"),
        ),
        ".venv-ray/setup.stamp",
    ),
    Benchmark(
        "orchestrator",
        "perf/orchestrator.py --workers 128 1024 --json",
        "--workers 2 4 --requests 16 --seconds 1",
        SERVICE,
        (
            Figure(
                "orchestrator, 128 workers, tokens per core second", "rows.0.tokens_per_core_s", ">= 1000000", ",.0f"
            ),
            Figure("tokens per core second, 1,024 workers", "rows.1.tokens_per_core_s", ">= 1000000", ",.0f"),
            Figure("trajectories per core second, 128 workers", "rows.0.trajectories_per_core_s", ">= 2000", ",.0f"),
            Figure("trajectories per core second, 1,024 workers", "rows.1.trajectories_per_core_s", ">= 2000", ",.0f"),
            Figure("delay of the event loop, 1,024 workers, p99", "rows.1.loop_lag_ms_p99", "<= 50", ".1f ms"),
        ),
    ),
    Benchmark(
        "metrics",
        "perf/metrics.py --scrapes 30 --json",
        "--workers 8 --scrapes 5",
        ("dora/metrics", "dora/orchestrator/metrics"),
        (
            Figure("scrape of the metrics of 1,024 workers, p50", "rows.0.scrape_ms_p50", "<= 100", ".0f ms"),
            Figure("CPU time of that scrape", "rows.0.cpu_ms", "", ".0f ms"),
            Figure("scrape every 15 s, share of a core", "rows.0.core_share", "<= 0.01", ".2%"),
        ),
    ),
    Benchmark(
        "sessions-open",
        "perf/sessions_open.py --seconds 10 --json",
        "--sessions 64 --workers 2 --clients 2 --length 16 --seconds 3",
        (*SERVICE, "dora/client"),
        (
            Figure("10,000 open sessions: delay of the event loop, p99", "loop_lag_ms_p99", "<= 50", ".1f ms"),
            Figure("10,000 open sessions: turns per core second", "turns_per_core_s", "", ",.0f"),
            Figure(
                "10,000 open sessions: memory per session, 5% in a turn", "bytes_per_session", "<= 4100", ",.0f bytes"
            ),
        ),
    ),
    Benchmark(
        "sessions",
        "perf/sessions.py --turns 50 --json",
        "--turns 8",
        ("dora/orchestrator", "dora/core", *ENGINE),
        (
            Figure("sessions of 50 turns: tokens prefilled twice", "prefilled_twice", "<= 0", ",.0f"),
            Figure("sessions of 50 turns: share of the contexts that was cached", "cached_share", ">= 0.95", ".3f"),
            Figure(
                "sessions of 50 turns: first token of a turn, p50",
                "turn_overhead_steps_p50",
                "<= 1.5",
                ".1f decode steps",
            ),
        ),
    ),
    Benchmark(
        "stream",
        "perf/stream.py --no-peer --json",
        "--trajectories 256 --tokens 256 --rounds 2",
        ("dora/client", "dora/rpc", "dora/data", "dora/orchestrator/rollout/responses"),
        (Figure("stream to the trainer, trajectories per second", "trajectories_per_s", ">= 50000", ",.0f"),),
    ),
    Benchmark(
        "transfer-queue",
        "perf/stream.py --json",
        "--trajectories 256 --tokens 256 --rounds 2",
        ("dora/client", "dora/rpc", "dora/data", "dora/orchestrator/rollout/responses"),
        (Figure("stream to the trainer, over TransferQueue", "vs_transfer_queue", ">= 5", ".2f times"),),
        needs=".cache/transfer-queue/bin/python",
    ),
    Benchmark(
        "guard",
        "perf/guard.py --json",
        "--trajectories 128 --tokens 256 --kv-mb 2 --rounds 2",
        ("dora/tls", "dora/rpc", "dora/client", *KV),
        (
            Figure("stream under mutual TLS, of that in the clear", "stream_share", ">= 0.75"),
            Figure("KV by `tcp` between hosts under TLS, times that in the clear", "kv_times", "<= 2"),
            Figure("KV by `tcp` between hosts under TLS, CPU time of the busier end", "kv_cpu_times", "<= 2"),
            Figure("KV by `tcp` on one host under TLS, where `shm` is used", "kv_same_host_times", "<= 2"),
        ),
    ),
    Benchmark(
        "kv",
        "perf/kv_migration.py --only transports park blackout --json",
        "--megabytes 4 --rounds 2 --tokens 64 256",
        (*KV, "dora/pool", *ENGINE),
        (
            Figure("KV by `shm`, of one memcpy", "shm_vs_memcpy", ">= 0.60"),
            Figure("KV by `tcp`, of `sendall`", "tcp_vs_sendall", ">= 0.90"),
            Figure("KV by `gloo`, of a bare group", "gloo_vs_gloo_raw", ">= 0.90"),
            Figure("park, of one memcpy", "park_vs_memcpy", ">= 0.50"),
            Figure("resume, of one memcpy", "resume_vs_memcpy", ">= 0.50"),
            Figure("blackout of a move, decode steps", "blackout_steps_p50", "<= 2"),
            Figure("blackout at 16K tokens, of 1K", "blackout_16k_vs_1k", "<= 1.5"),
            Figure("full batch with migrations, of undisturbed", "decode_while_migrating", ">= 0.95", ".3f"),
        ),
    ),
    Benchmark(
        "handoff",
        "perf/handoff.py --tokens 256 --json",
        "--model tiny --tokens 64",
        (*KV, *ENGINE),
        (Figure("re-prefill of 256 tokens, time over a handoff", "rows.0.reprefill_over_handoff"),),
    ),
    Benchmark(
        "speculation",
        "perf/speculation.py --batches 1 4 64 --json",
        "--steps 10 --rounds 1 --presets small small",
        (*ENGINE, "dora/lab/sim"),
        (
            Figure(
                "counting with drafts, 4 requests, tokens/s over none", "counting.batches.4.history_vs_off", ">= 1.3"
            ),
            Figure("tool loops, the same", "tool loops.batches.4.history_vs_off", ">= 1.3"),
            Figure(
                "counting with drafts of an earlier epoch too, 4 requests", "counting.batches.4.fleet_vs_off", ">= 1.3"
            ),
            Figure("tool loops with these", "tool loops.batches.4.fleet_vs_off", ">= 1.3"),
            Figure("counting with drafts, a full batch", "counting.batches.64.history_vs_off", ">= 0.97"),
            Figure("tool loops, the same batch", "tool loops.batches.64.history_vs_off", ">= 0.97"),
            Figure("counting, tokens a step of the fleet's history", "counting.tokens_per_step.fleet"),
            Figure("the same of vLLM's n-gram", "counting.tokens_per_step.vLLM's n-gram"),
            Figure(
                "dora-64 simulated, drafts as in counting: last group's time, of none",
                "counting.simulated.last_group_vs_off",
            ),
            Figure("agent-64, drafts as in tool loops", "tool loops.simulated.last_group_vs_off"),
        ),
    ),
    Benchmark(
        "hybrid",
        "perf/hybrid.py --tokens 2048 8192 16384 --json",
        "--tokens 64 256",
        (*KV, *ENGINE),
        (
            Figure("blackout of a hybrid's move, decode steps counted", "steps", "<= 2"),
            Figure("blackout of a hybrid at 16K tokens, of 2K", "longest_vs_shortest", "<= 1.5"),
            Figure("re-prefill of a hybrid's 16K tokens, time over a move", "reprefill_over_move"),
        ),
    ),
    Benchmark(
        "relays",
        "-m perf.relays --rounds 2 --json",
        "--body-mb 32 --link-mb 256 --rounds 1",
        ("dora/relay", "dora/weights", "dora/kvtransfer"),
        (
            Figure("version to eight hosts, over one", "fanout8_vs_1", "<= 1.2"),
            Figure("decoding during distribution, of undisturbed", "decode_during_broadcast", ">= 0.95", ".3f"),
            Figure("version to another zone in bfloat16, time of deltas over whole", "zone_delta_vs_whole_BF16"),
            Figure("version to another zone in float32, the same", "zone_delta_vs_whole_F32"),
        ),
    ),
    Benchmark(
        "weights",
        "perf/weights.py --only stall delta load --rounds 5 --json",
        "--model tiny --rounds 2",
        ("dora/client", "dora/weights", *ENGINE),
        (
            Figure("commit's hold, over one copy", "stall_vs_memcpy", "<= 1.3"),
            Figure("load into vLLM, over one copy", "load_vs_memcpy", "<= 2", ".1f"),
            Figure("bytes of a version after a step in bfloat16, of all", "delta_vs_full", "", ".1%"),
        ),
    ),
    Benchmark(
        "front",
        "perf/front.py --streams 2000 --json",
        "--streams 20 --tokens 20",
        FRONT,
        (Figure("front with 2,000 streams, tokens per core second", "tokens_per_core_s", ">= 50000", ",.0f"),),
    ),
    Benchmark(
        "front-chats",
        "-m perf.front_chats --conversations 260 --json",
        "--conversations 13 --turns 3",
        FRONT,
        (
            Figure("chats of 20 turns over 13 templates: breaks of a prefix", "prefix_breaks", "<= 0", ".0f"),
            Figure("chats of 20 turns: replies with other tokens than the record's", "token_mismatch", "<= 0", ".0f"),
        ),
    ),
    Benchmark(
        "front-vllm",
        "perf/front_vllm.py --json",
        "--model tiny --conversations 2 --turns 2 --tokens 8 --rounds 1",
        (*FRONT, *SERVICE, *ENGINE),
        (
            Figure("chat through a front, throughput over vLLM's own server", "tokens_vs_vllm_server", ">= 0.95"),
            Figure(
                "chat through a front, time to the first token over that server", "first_token_vs_vllm_server", "<= 1.2"
            ),
        ),
        needs=".venv-vllm-server/bin/python",
    ),
    Benchmark(
        "profile",
        "perf/profile_run.py --rounds 1 --steps 2 --warmup 1 --groups 8 --json",
        "--model tiny --prompts tiny --steps 1 --groups 2 --max-tokens 32 --max-model-len 256 --kv-tokens 4096",
        ("dora/lab", "dora/core", *ENGINE),
        (Figure("error of a profile's prediction", "error", "<= 0.15", ".1%"),),
    ),
    Benchmark(
        "mixture",
        "perf/mixture.py --rounds 2 --json",
        "--experts 8 --per-token 2 --layers 1 --rounds 1",
        ("dora/lab/planning", "dora/worker"),
        (Figure("share of experts that a token reads, as profiled; 0.125 of the model", "expert_fraction", "", ".3f"),),
    ),
    Benchmark(
        "batches",
        "perf/batches.py --json",
        "--groups 2",
        ("dora/trainers",),
        (Figure("packed micro-batches, CPU time of padded ones", "packed_vs_padded"),),
    ),
    Benchmark(
        "router-replay",
        "perf/router_replay.py --json",
        "--responses 4 --tokens 16 --layers 2",
        ("dora/trainers", *ENGINE),
        (
            Figure("router replay: mean difference of logprobs", "moe_replay.mean", "", ".5f"),
            Figure("without router replay: mean difference of logprobs", "moe.mean", "", ".5f"),
        ),
    ),
    Benchmark(
        "gpu-blocks",
        "perf/gpu_blocks.py --json",
        "--megabytes 16 --rounds 2",
        ("dora/worker/copying",),
        (
            Figure("KV blocks out of a GPU, of one memcpy", "LBNHC.show_vs_memcpy"),
            Figure("KV blocks into a GPU, of one memcpy", "LBNHC.write_vs_memcpy"),
        ),
        needs="/dev/nvidiactl",
    ),
)
