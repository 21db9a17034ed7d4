"""The review of the path to GPUs by reading, and the test that finds each of its 21 findings without a GPU.

Tests of ``tests/cuda_build`` run by ``make check-cuda``, those that need Model Runner V2 by ``make test-v2``. What is
still open has a reason.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "tests/cuda_build/test_build.py"
ORDER = "tests/unit/test_stream_order.py"
PLANTED = f"{ORDER}::test_a_planted_fault_of_order_is_found"
PLACEMENT = "tests/unit/test_placement.py"
PORT = "tests/unit/test_device_port.py"
PATCHES = "tests/unit/test_engine_patches.py"
GROUP = "tests/contract/test_torch_group.py"
ARGUMENTS = f"{PORT}::test_the_arguments_of_both_devices_are_as_recorded"


@dataclass(frozen=True)
class Finding:
    """``tests``: ids of pytest; ``open``: what of it is not done."""

    text: str
    tests: tuple[str, ...] = ()
    open: str = ""


FINDINGS: dict[int, Finding] = {
    1: Finding(
        "the extra installs a vLLM that the patches refuse",
        (f"{PATCHES}::test_what_an_extra_and_its_lock_install_is_what_every_patch_is_for",),
    ),
    2: Finding(
        "the worker class is the CPU's", (f"{BUILD}::test_the_rank_is_vllms_worker_with_what_the_engine_calls",)
    ),
    3: Finding(
        "patches assume a CPU and Model Runner V1",
        (
            f"{BUILD}::test_every_patch_of_the_device_takes_effect",
            f"{BUILD}::test_the_runner_of_the_build_takes_a_requests_outputs_with_it",
            "tests/contract/test_engine.py::test_frozen_requests_stand_still_and_go_on_as_if_nothing_had_happened",
        ),
    ),
    4: Finding(
        "all workers of a service are on GPU 0",
        (
            f"{PORT}::test_one_function_gives_workers_their_gpus",
            f"{PLACEMENT}::test_eight_workers_on_eight_gpus_have_one_each",
        ),
    ),
    5: Finding(
        "agents wrap round, ignore inherited GPUs, keep none for a trainer, and serve on another device silently",
        (
            f"{PLACEMENT}::test_no_gpu_has_two_ranks_and_too_many_workers_are_refused",
            f"{PLACEMENT}::test_gpus_are_chosen_among_the_visible_ones",
            f"{PLACEMENT}::test_gpus_of_a_trainer_are_kept",
            f"{PORT}::test_a_vllm_for_another_device_is_refused",
        ),
    ),
    6: Finding(
        "ranks on GPUs are refused nowhere, and their kernels get host memory",
        (
            f"{BUILD}::test_ranks_are_refused_by_name_until_this_machine_has_a_proof",
            "tests/unit/test_kv_memory.py::test_kv_in_host_memory_can_be_mapped_and_kv_on_a_device_stays_there",
            "tests/contract/test_ranks.py::test_a_request_that_leaves_and_returns_goes_on_bitwise",
        ),
    ),
    7: Finding(
        "float32 by default, computed in TF32",
        (
            f"{PORT}::test_a_gpu_computes_in_bfloat16_unless_it_is_told_otherwise_and_float32_is_not_tf32",
            f"{BUILD}::test_triton_reads_the_precision_of_float32_where_the_device_sets_it",
        ),
    ),
    8: Finding(
        "the engine's import replaces torch.cuda's streams and events",
        (
            f"{PATCHES}::test_vllms_cpu_modules_are_imported_by_the_cpu_adapter_alone",
            f"{BUILD}::test_no_module_of_the_engine_imports_vllms_cpu_modules",
            f"{BUILD}::test_a_process_whose_torch_was_replaced_is_refused",
            f"{PLANTED}[events that are none]",
        ),
    ),
    9: Finding(
        "copies are joined after the forward pass",
        (
            f"{PLANTED}[join after the forward pass]",
            f"{PORT}::test_a_step_joins_the_copies_of_kv_before_it_runs",
            f"{BUILD}::test_the_build_joins_a_step_that_loads_no_kv_after_its_forward_pass",
        ),
    ),
    10: Finding(
        "logits to the last bit are claimed on GPUs",
        (
            "tests/unit/test_batch_invariant.py::test_a_worker_gets_it_before_it_imports_anything",
            "tests/unit/test_tolerances.py::test_verify_says_which_rule_it_applied",
        ),
    ),
    11: Finding(
        "proofs of reloads pass on kernels that they do not know",
        ("tests/contract/test_v2_runner.py::test_a_reload_that_leaves_a_tensor_stale_is_found",),
    ),
    12: Finding(
        "eager and without compilation",
        (ARGUMENTS, f"{BUILD}::test_vllm_takes_the_engines_arguments_as_they_are_meant"),
    ),
    13: Finding("no chunked prefill", (ARGUMENTS, f"{PORT}::test_a_request_in_mid_prefill_does_not_move")),
    14: Finding(
        "the size of the KV-cache is not that of the free memory, and a full GPU is a traceback",
        (ARGUMENTS, f"{BUILD}::test_too_large_a_kv_cache_is_refused_by_name"),
    ),
    15: Finding(
        "NCCL's bytes pass host memory, on the engine's stream",
        (f"{PORT}::test_nccl_is_used_only_if_it_is_named",),
        open="KV does not go straight from one GPU to another; NCCL is used only if kv.transports names it",
    ),
    16: Finding(
        "the set-up of a communicator has no deadline",
        (
            f"{GROUP}::test_joining_that_hangs_is_given_up_at_its_deadline",
            f"{GROUP}::test_a_target_that_does_not_join_fails_the_source_in_time[stops before the communicator]",
            f"{GROUP}::test_a_target_that_fails_in_the_middle_fails_the_source_in_time",
        ),
    ),
    17: Finding(
        "pinned memory is unbounded",
        (
            "tests/unit/test_cuda_blocks.py::test_pinned_memory_is_bounded_and_comes_back",
            "tests/unit/test_rank_stores.py::test_ranks_share_the_bound_of_pinned_memory",
        ),
    ),
    18: Finding(
        "slices of 1 MiB never fill the stage",
        ("tests/unit/test_cuda_blocks.py::test_a_reservation_writes_slices_of_the_stores_stage",),
    ),
    19: Finding(
        "a load has 60 seconds whatever its size",
        (
            "tests/unit/test_weight_ring.py::test_the_limit_of_a_load_follows_from_its_bytes",
            "tests/unit/test_weight_ring.py::test_a_load_that_is_too_slow_is_refused_with_its_numbers",
        ),
    ),
    20: Finding(
        "host memory for NIXL, and no binding to the GPU's NUMA node",
        (f"{PLACEMENT}::test_eight_workers_are_bound_to_what_is_next_to_their_gpus",),
        open="NIXL moves host memory",
    ),
    21: Finding(
        "a fixed block size excludes backends",
        (ARGUMENTS, f"{BUILD}::test_a_block_size_of_the_user_is_kept"),
    ),
}


def test_each_finding_has_a_test_or_a_reason() -> None:
    assert list(FINDINGS) == list(range(1, 22))
    assert not [number for number, finding in FINDINGS.items() if not finding.tests and not finding.open]


@pytest.mark.parametrize("test", sorted({test for finding in FINDINGS.values() for test in finding.tests}))
def test_the_test_exists(test: str) -> None:
    match = re.fullmatch(r"([\w/.]+)::(\w+)(?:\[(.+)\])?", test)
    assert match is not None
    source = (ROOT / match[1]).read_text(encoding="utf-8")
    functions = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    assert match[2] in functions
    assert match[3] is None or f'"{match[3]}"' in source
