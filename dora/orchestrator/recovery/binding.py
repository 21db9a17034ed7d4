"""Binds a state folder to what belongs to it: the run record, prompt files, reward function and model.

Each may be older, newer, changed, or another run's. A start compares steps and digests, and refuses a contradiction
with both sides. ``service.carry_on_from``, the step at which the state stands, accepts it: the record's later content
is set aside, and the new digests are stored.
"""

import asyncio
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from dora.config import Config
from dora.data.record_content import RecordContent
from dora.data.record_run import RecordRun, run_of, set_aside, write_run
from dora.data.run_record import STEPS_FILE, TRAJECTORIES_FILE, Recorder
from dora.errors import InvalidValue
from dora.journal.durable import source_of
from dora.orchestrator.recovery.state_folder import SETTING, StateFolder
from dora.prompts.files import is_file_source, prompt_files

log = logging.getLogger("dora.service")

WHOLE_BYTES: Final = 64 << 20  # a larger file's digest covers its length and
SAMPLES: Final = 64  # pieces of
SAMPLE_BYTES: Final = 64 << 10
BUILT_IN: Final = "dora."  # modules whose functions come with DORA


class NotOfOneTime(InvalidValue):
    """Says that the state folder contradicts its record or what the run depends on, with each contradiction."""

    def __init__(self, folder: Path, newest: int, contradictions: Mapping[str, str]) -> None:
        self.contradictions = dict(contradictions)
        allowed = (
            f"a folder that fits the rest; restore the one that is wrong, or carry on from step {newest} deliberately "
            f"with --carry-on-from {newest}, which moves later content of the record aside and deletes nothing"
        )
        why = f"cannot be carried on ({'; '.join(self.contradictions.values())})"
        super().__init__(SETTING, str(folder), allowed, why=why)


def content_of(config: Config, model: Path, reward: str) -> dict[str, str]:
    """Returns the digests of what a run depends on, by setting. ``reward`` is the function in force.

    Large files are sampled. A function's digest covers its module's file.
    """
    source = config.prompts.source
    files = prompt_files(config.prompts) if source != "none" and is_file_source(source) else []
    return {
        "model": _digest(sorted(each for each in model.iterdir() if each.is_file() and each.name[0] != ".")),
        "prompts": _digest(files),
        "reward.function": _digest(_module_files(reward)),
        "selection.filter": _digest(_module_files(config.selection.filter)),
    }


async def bind(
    config: Config, state: StateFolder, recorder: Recorder | None, content: Mapping[str, str]
) -> Recorder | None:
    """Checks that state, record and content belong together, and stores that they do. Returns the record, opened again
    if content was set aside.

    Raises NotOfOneTime for a contradiction that ``service.carry_on_from`` does not accept; OSError.
    """
    newest, folder = state.found.durable.newest, Path(config.record)
    against, surplus = check_binding(config, state, recorder, content)
    if against:
        log.warning("carrying on from step %d although %s", newest, against)
    if recorder is not None and surplus is not None:
        trained_at = recorder.committed.get(surplus - 1, 0.0)
        recorder.close()
        aside = await asyncio.to_thread(set_aside, folder, surplus, trained_at)
        log.warning("the record's content from step %d on was moved to %s", surplus, aside)
        recorder = await asyncio.to_thread(Recorder, folder, config.workers.numerics, config.record_weights)
    source = source_of(config.model_dump_json(include={"prompts"}))
    state.remember(content=dict(content), source=source, record=_name_of(folder) if recorder is not None else "")
    if recorder is not None:
        known = run_of(folder)
        if state.found.is_new or known is None or known.run != state.identity.run:
            write_run(folder, RecordRun(state.identity.run, newest))
    return recorder


def check_binding(
    config: Config, state: StateFolder, record: RecordContent | None, content: Mapping[str, str]
) -> tuple[str, int | None]:
    """Returns the contradictions that ``service.carry_on_from`` accepts, and the first step whose content in the record
    is to be set aside; changes nothing.

    Raises NotOfOneTime for contradictions that it does not accept.
    """
    if state.found.is_new:
        return "", None
    before = state.identity.content
    source = source_of(config.model_dump_json(include={"prompts"}))
    if (state.identity.source or source_of(state.found.durable.config)) != source:
        before = {name: digest for name, digest in before.items() if name != "prompts"}
    contradictions, surplus = dict(changed(config, before, content)), None
    if record is not None:
        surplus = first_surplus(state, record)
        contradictions |= of_record(config, state, record, surplus)
    newest = state.found.durable.newest
    if contradictions and config.service.carry_on_from != newest:
        raise NotOfOneTime(state.folder, newest, contradictions)
    return "; ".join(contradictions.values()), surplus


def changed(config: Config, before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the settings whose content has changed since the last incarnation, each with a message."""
    named = {
        "model": config.model,
        "prompts": config.prompts.source,
        "reward.function": config.reward.function or "the prompts' own",
        "selection.filter": config.selection.filter,
    }
    for name, digest in now.items():
        if before.get(name, digest) != digest:
            digests = f"{before[name][:12]} then, {digest[:12]} now"
            yield name, f"the content of {name} = {named[name]!r} has changed: {digests}"


def first_surplus(state: StateFolder, recorder: RecordContent) -> int | None:
    """Returns the first step that the record has and the state does not, or has otherwise, or None.

    The record gets a step's line before the state commits the step, so it may be one step ahead, with the groups that
    the state has leased to this step.
    """
    newest, commits = state.found.durable.newest, state.found.durable.commits
    known = run_of(recorder.folder)
    if known is not None and known.run == state.identity.run:
        for step, at in sorted(recorder.committed.items()):
            if step >= known.since and step < newest and commits.get(step, at) != at:
                return step
    last = recorder.last
    if last is None or last.step < newest:
        return None
    leased = {group.group_id for group in state.found.groups if group.step == newest}
    return None if last.step == newest and last.groups.keys() <= leased else newest


def of_record(config: Config, state: StateFolder, recorder: RecordContent, surplus: int | None) -> dict[str, str]:
    """Returns the contradictions between the state and its record. Raises InvalidValue for another run's record."""
    newest, identity, record = state.found.durable.newest, state.identity, config.record
    known = run_of(recorder.folder)
    if known is not None and known.run != identity.run and not recorder.is_empty:
        allowed = f"the record of the run that {state.folder} holds ({identity.run}), or a new folder"
        raise InvalidValue("record", record, allowed, why=f"belongs to another run ({known.run})")
    found = {}
    last = max(recorder.committed, default=-1)
    ends = f"record {record!r} has steps up to {last}, and the state is at step {newest}"
    if surplus is not None and surplus < newest:
        both = f"record {record!r} and the state"
        found["commits"] = f"{both} have different commits of step {surplus}: one is of another time"
    elif surplus is not None:
        found["state is older"] = f"{ends}: the state is older"
    elif recorder.is_empty and newest and identity.record == _name_of(recorder.folder):
        found["record was removed"] = (
            f"record {record!r} is empty, and the state is at step {newest}: the record was removed"
        )
    elif not recorder.is_empty and last < newest - 1:
        found["record is older"] = f"{ends}: the record is older"
    if recorder.missing_trajectories:
        what = f"{recorder.missing_trajectories} trajectories or more that {STEPS_FILE} counts"
        found[TRAJECTORIES_FILE] = f"record {record!r} lacks {what}: {TRAJECTORIES_FILE} is older"
    return found


def _name_of(folder: Path) -> str:
    return str(folder.resolve())


def _module_files(function: str) -> list[Path]:
    module = function.partition(":")[0]
    if ":" not in function or module.startswith(BUILT_IN):
        return []
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return []
    return [Path(spec.origin)] if spec is not None and spec.has_location and spec.origin else []


def _digest(files: Iterable[Path]) -> str:
    found, is_empty = hashlib.blake2b(digest_size=16), True
    for file in files:
        is_empty = False
        found.update(f"{file.name}\0".encode())
        with file.open("rb") as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            found.update(size_bytes.to_bytes(8, "little"))
            if size_bytes <= WHOLE_BYTES:
                found.update(stream.read())
                continue
            for index in range(SAMPLES):
                stream.seek((size_bytes - SAMPLE_BYTES) * index // (SAMPLES - 1))
                found.update(stream.read(SAMPLE_BYTES))
    return "" if is_empty else found.hexdigest()
