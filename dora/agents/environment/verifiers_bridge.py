"""Runs episodes of verifiers 0.4 in its own environment: ``python -P verifiers_bridge.py NAME MODEL TURNS [FD]``.

It imports nothing of DORA, whose requirements are others. Without FD it says whether NAME can be loaded. Otherwise it
reads requests from a socket, one JSON object a line, and answers each:

    {"id": "g0.1", "task": 17, "base_url": "http://..."}  ->  {"id": "g0.1", "reward": 0.5, "components": {}, "log": ""}
                                                           or  {"id": "g0.1", "error": "why the episode failed"}
    {"cancel": "g0.1"}                                    ->  nothing: the episode is ended

The first answer is {"ready": true} or {"refused": "why"}. It ends with the socket. Source: verifiers 0.4,
``verifiers/v1/serve/server.py``.
"""

import asyncio
import importlib.util
import json
import socket
import sys
import tomllib
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path
from typing import Any

LINE_BYTES = 1 << 20
KEY_VARIABLE = "DORA_SESSION_KEY"
MODEL = "policy"
LOG_CHARACTERS = 1000
TASKS_MAX = 65536


_SESSION: ContextVar[str] = ContextVar("session", default="verifiers")


class Refused(Exception):
    """A taskset cannot be driven, for this reason."""


class VerifiersEpisodes:
    """The episodes of one environment of verifiers. ``spec``: a taskset, or a TOML file with ``env`` and ``client``."""

    def __init__(self, spec: str, model: str, turns: int) -> None:
        self._vf = _imported()
        data: dict[str, Any] = {"env": {"taskset": {"id": spec}}}
        if spec.endswith(".toml"):
            with open(spec, "rb") as file:
                data = tomllib.load(file)
        unknown = sorted(data.keys() - {"env", "client"})
        if unknown or "env" not in data:
            raise Refused(f"{spec} has {unknown or 'no env'}: the tables are [env] and [client]")
        self._client, self._model, self._turns = data.get("client", {}), model, turns
        self.env = self._vf.load_environment(self._vf.resolve_env_config(self._local(data["env"])))
        self._tasks: dict[int, Any] = {}  # of an endless taskset the latest TASKS_MAX
        self._count = 0  # that were read
        self._unread: Any = None
        self._reading = asyncio.Lock()

    def _local(self, env: dict[str, Any]) -> dict[str, Any]:
        """Runs programs on this host unless the file says otherwise: verifiers' default is a remote sandbox."""
        cls = self._vf.env_config_type(env.get("taskset", {}).get("id", ""), env.get("id", ""))
        agents = [name for name, field in cls.model_fields.items() if isinstance(field.default, self._vf.AgentConfig)]
        ours = {"runtime": {"type": "subprocess"}, **({"max_turns": self._turns} if self._turns else {})}
        return {**env, **{name: {**ours, **env.get(name, {})} for name in agents}}

    async def task(self, number: int) -> Any:
        """Returns a task of the taskset, which begins anew after its last one."""
        async with self._reading:
            return await asyncio.to_thread(self._task, number)

    def _task(self, number: int) -> Any:
        if self._unread is None:
            self._unread = iter(self.env.taskset)
        while self._count <= number:
            task = next(self._unread, None)
            if task is None:
                break
            self._tasks[self._count] = task
            self._count += 1
            if len(self._tasks) > TASKS_MAX and not self.env.taskset.bounded:
                del self._tasks[self._count - 1 - TASKS_MAX]
        if not self._tasks:
            raise Refused("the taskset has no task")
        if number % self._count not in self._tasks:
            raise Refused(f"task {number} is more than {TASKS_MAX} tasks behind the latest one")
        return self._tasks[number % self._count]

    async def run(self, number: int, base_url: str) -> dict[str, Any]:
        """Runs one episode against a session. Returns its reward, or the error that it ended with."""
        task = await self.task(number)
        about = {"base_url": base_url, "api_key_var": KEY_VARIABLE, **self._client}
        if about.get("type") == "train":
            client = self._vf.TrainClientConfig(**{"renderer_model_name": self._model, **about})
        else:
            client = self._vf.EvalClientConfig(**about)
        ctx = self._vf.ModelContext(model=MODEL, client=client, sampling=self._vf.SamplingConfig())
        episode = await self.env.run_episode(task, ctx)
        return _outcome(episode, base_url)


def _outcome(episode: Any, base_url: str) -> dict[str, Any]:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        said = [f"{error.type}: {error.message}" for error in errors] or ["the episode failed"]
        return {"error": said[-1][:LOG_CHARACTERS]}
    ours = [trace for trace in episode.traces if trace.agent.config.client.base_url == base_url]
    if len(ours) != 1 or not ours[0].agent.trainable:
        names = ", ".join(str(trace.agent.name) for trace in ours) or "none"
        return {"error": f"one trainable agent must use the session, and {names} did: give others a model and client"}
    (trace,) = ours
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    stopped = f", stopped: {trace.stop_condition}" if trace.stop_condition else ""
    log = f"task {trace.task.data.idx}, {trace.num_turns} turns{stopped}"
    return {"reward": float(trace.reward), "components": {**metrics, **rewards}, "log": log}


def _imported() -> Any:
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise Refused(f"{sys.executable} has no verifiers 0.4 ({error})") from error
    found = version("verifiers")
    if tuple(map(int, found.split(".")[:2])) < (0, 4):
        raise Refused(f"verifiers {found} is too old: 0.4 is needed")
    return vf


async def serve(episodes: VerifiersEpisodes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    running: dict[str, asyncio.Task[None]] = {}

    def send(answer: dict[str, Any]) -> None:
        writer.write(json.dumps(answer).encode() + b"\n")

    async def run(name: str, number: int, base_url: str) -> None:
        _SESSION.set(name)
        try:
            send({"id": name, **await episodes.run(number, base_url)})
        except Exception as error:  # of a taskset, a harness or a task
            send({"id": name, "error": _one_line(error)[:LOG_CHARACTERS]})
        finally:
            del running[name]

    async with episodes.env.serving():
        send({"ready": True})
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if "cancel" in message:
                    if message["cancel"] in running:
                        running[message["cancel"]].cancel()
                else:
                    name = message["id"]
                    running[name] = asyncio.create_task(run(name, message["task"], message["base_url"]))
        finally:
            left = list(running.values())
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)


async def main(spec: str, model: str, turns: int, descriptor: int) -> None:
    _prefix_output()
    connected = socket.socket(fileno=descriptor)
    reader, writer = await asyncio.open_connection(sock=connected, limit=LINE_BYTES)
    try:
        episodes = VerifiersEpisodes(spec, model, turns)
    except Exception as error:  # of a taskset's module
        writer.write(json.dumps({"refused": _one_line(error)}).encode() + b"\n")
        await writer.drain()
        return
    await serve(episodes, reader, writer)


def _prefix_output() -> None:
    """Loads DORA's module for output by its file: it needs nothing else of DORA."""
    file = Path(__file__).parents[2] / "system" / "prefixed_output.py"
    spec: Any = importlib.util.spec_from_file_location("prefixed_output", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.prefix_output(_SESSION.get)


def _one_line(error: Exception) -> str:
    said = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
    return " ".join(said.split())


if __name__ == "__main__":
    name, folder, turns_most, *descriptors = sys.argv[1:]
    if descriptors:
        asyncio.run(main(name, folder, int(turns_most), int(descriptors[0])))
    else:
        try:
            VerifiersEpisodes(name, folder, int(turns_most))
        except Exception as refused:
            sys.exit(_one_line(refused))
