"""Bindings to NUMA nodes: what is chosen, and that a process and its children have it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.system.numa import CPUS, MEMORY_NODES, Allowed, Locality, bind, binding_of, inherited, numbers, written

SETS = st.frozensets(st.integers(0, 200))


@given(SETS)
def test_lists_are_written_as_they_are_read(found: frozenset[int]) -> None:
    assert numbers(written(found)) == numbers(f" {written(found)}\n") == found


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1-2-3", "1;2"])
def test_another_text_is_no_list(text: str) -> None:
    with pytest.raises(ValueError):
        numbers(text)


@given(
    places=st.lists(st.builds(Locality, st.integers(-1, 3), st.frozensets(st.integers(0, 15))), max_size=4),
    may_use=st.builds(Allowed, st.frozensets(st.integers(0, 15)), st.frozensets(st.integers(0, 3))),
)
def test_a_binding_is_all_that_is_near_and_allowed(places: list[Locality], may_use: Allowed) -> None:
    binding = binding_of(places, may_use)
    assert bool(binding.cpus) != bool(binding.why) and bool(binding.environment) == bool(binding.cpus)
    if binding.why:
        assert not places or any(place.node < 0 or not place.cpus & may_use.cpus for place in places)
        return
    near = frozenset().union(*(place.cpus for place in places))
    assert binding.cpus == near & may_use.cpus
    assert binding.nodes == {place.node for place in places} & may_use.nodes
    assert numbers(binding.environment[CPUS]) == binding.cpus


def test_what_this_process_may_use_is_its_affinity_and_its_cpuset(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nMems_allowed:\t00000003\nMems_allowed_list:\t0-1\n")
    assert inherited(status) == Allowed(frozenset(os.sched_getaffinity(0)), frozenset({0, 1}))
    assert inherited(tmp_path / "none").nodes == frozenset()


SCRIPT = """
import json, os, subprocess, sys, threading
from dora.system.numa import bind
ready, end, inside = threading.Event(), threading.Event(), []
def beside():
    ready.set(); end.wait(); inside.extend(os.sched_getaffinity(0))
thread = threading.Thread(target=beside); thread.start(); ready.wait()
line = bind(); end.set(); thread.join()
child = subprocess.run(["cat", "/proc/self/status", "/proc/self/numa_maps"], capture_output=True, text=True).stdout
print(json.dumps([line, sorted(os.sched_getaffinity(0)), sorted(inside), child]))
"""


def bound(stated: dict[str, str]) -> tuple[str, list[int], list[int], str]:
    environment = {**os.environ, **stated}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    line, own, thread, child = json.loads(done.stdout)
    return line, own, thread, child


def test_a_process_its_threads_and_its_children_are_bound() -> None:
    cpu, nodes = max(os.sched_getaffinity(0)), inherited().nodes
    line, own, thread, child = bound({CPUS: str(cpu), MEMORY_NODES: written(nodes)})
    assert own == thread == [cpu] and f"Cpus_allowed_list:\t{cpu}\n" in child
    assert f"CPUs {cpu}" in line
    if len(nodes) == 1 and os.access("/proc/self/numa_maps", os.R_OK):
        assert f" prefer:{written(nodes)} " in child


@pytest.mark.parametrize("stated", [{CPUS: "4095"}, {CPUS: "x"}, {CPUS: ""}, {}])
def test_what_cannot_be_bound_is_left_as_it_is(stated: dict[str, str]) -> None:
    before = os.sched_getaffinity(0)
    line = bind(stated)
    assert os.sched_getaffinity(0) == before
    assert ("not bound" in line) == bool(stated.get(CPUS))


def test_a_worker_is_bound_before_anything_else_and_says_so() -> None:
    cpu = min(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "dora.worker", "--orchestrator", "x:1", "--worker-id", "w0", "--model", "m"]
    environment = {**os.environ, CPUS: str(cpu), "DORA_TOKEN": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"bound to CPUs {cpu}" in done.stderr
