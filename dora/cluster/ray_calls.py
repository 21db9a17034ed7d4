"""The calls to Ray of one run, whose actors and placement groups bear its name."""

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import ray
from ray._private.state import state as cluster_state  # nothing public knows draining nodes and the autoscaler's bounds
from ray.exceptions import ActorDiedError, RayError
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from dora.cluster.adapter import Job
from dora.cluster.ray_order import State, part_of
from dora.errors import InvalidValue

CONNECT_S: Final = 5.0
ANSWER_S: Final = 10.0  # of all actors
NO_ROOM: Final = ("NO_RESOURCES", "INFEASIBLE")  # Ray has tried to place a group


def connect(address: str) -> None:
    """Connects this process to a Ray cluster, unless its script has. Raises InvalidValue where there is none."""
    if ray.is_initialized():
        return
    wanted = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
    try:
        if wanted != "auto":  # Ray itself would try for minutes
            host, _, port = wanted.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(wanted, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:  # a ConnectionError is an OSError
        allowed = f"HOST:PORT of a Ray cluster that runs, as `ray start --head` prints it ({_line(error)})"
        raise InvalidValue("ray.address", wanted, allowed) from error


def lacks_room(bundle: Mapping[str, float]) -> bool:
    """Whether no node has the resources of a bundle, even a free one, and Ray cannot add any."""
    fits = any(
        node["Alive"] and all(node["Resources"].get(name, 0) >= amount for name, amount in bundle.items())
        for node in ray.nodes()
    )
    most = cluster_state.get_max_resources_from_cluster_config() or {}  # of an autoscaler
    return not fits and any(most.get(name, 0) < amount for name, amount in bundle.items())


def drained_by_s(node: str) -> float | None:
    """Returns the time (Unix) at which a node goes, 0 if Ray was not told when, or None if it stays."""
    deadline_ms = cluster_state.get_draining_nodes().get(node)
    return None if deadline_ms is None else deadline_ms / 1000


def group_of(run: str, name: str) -> str:
    return f"{run}-{name}"


def groups(run: str) -> dict[str, dict[str, Any]]:
    """Returns the placement groups of a run by part, as Ray describes them."""
    prefix = group_of(run, "")
    living = (each for each in placement_group_table().values() if each["state"] != "REMOVED")
    return {each["name"].removeprefix(prefix): each for each in living if each["name"].startswith(prefix)}


def actor_of(run: str, name: str) -> Any:
    """Returns the actor, or None if it has ended for good."""
    with suppress(ValueError):
        return ray.get_actor(name, namespace=run)
    return None


def remove(run: str, name: str) -> None:
    """Ends an actor, which Ray would start again without its group, and removes the group."""
    if (actor := actor_of(run, name)) is not None:
        ray.kill(actor)
    if (group := groups(run).get(name)) is not None:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group["placement_group_id"])))


def reports(run: str) -> Iterator[Job]:
    asked: dict[str, Any] = {}
    for name, group in groups(run).items():
        if group["state"] != "CREATED":
            is_lost, lacks = group["state"] == "RESCHEDULING", group["stats"]["scheduling_state"] in NO_ROOM
            why = f"{'its node is lost, and no other' if is_lost else 'no node'} has room for {group['bundles'][0]}"
            state = State.PENDING if is_lost or lacks else State.STARTING
            yield Job(name, part_of(name), state, "", why if state == State.PENDING else "")
        elif (actor := actor_of(run, name)) is not None:
            asked[name] = actor.report.remote()
        else:
            yield Job(name, part_of(name), State.REFUSED, "", "its actor is gone")
    if asked:
        ray.wait([*asked.values()], num_returns=len(asked), timeout=ANSWER_S)
    for name, answer in asked.items():
        try:
            yield ray.get(answer, timeout=0)
        except ActorDiedError as error:  # it could not be made: no DORA on its node
            yield Job(name, part_of(name), State.REFUSED, "", _line(error))
        except RayError as error:  # its node may be lost, which Ray sees after some seconds
            yield Job(name, part_of(name), State.SILENT, "", type(error).__name__)


def release(run: str, name: str) -> None:
    with suppress(RayError):
        if (actor := actor_of(run, name)) is not None:
            actor.release.remote()


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
