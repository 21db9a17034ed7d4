"""The environments of ``dora demo --agent``, without a policy."""

from typing import Any

import pytest
from rich.console import Console

from dora.agents.environment import End, Reply, Task
from dora.agents.environment.loading import load_environment
from dora.models.tiny_vocabulary import CLASSES
from dora.ops.demo import agent_tasks
from dora.ops.demo.agent_tasks import CHECKER, LOOKUP, Checked, Lookup
from dora.ops.demo.presets import AGENT_PRESETS
from dora.ops.view.live import service_view
from dora.ops.view.narration import news
from dora.rpc import dora_pb2 as pb


@pytest.fixture(autouse=True)
def quick_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_tasks, "TOOL_S", 0.0)


def reply(turn: int, text: str) -> Reply:
    return Reply(turn, text, tuple(range(len(text))), "length")


async def test_the_tool_names_what_the_later_turns_are_rewarded_for() -> None:
    environment = Lookup()
    await environment.reset(Task("p7"))
    (told,) = await environment.step(reply(0, "????????"))  # type: ignore[misc]
    assert told["role"] == "tool" and told["name"] == LOOKUP
    right = CLASSES[told["content"]][: Lookup.TURN_TOKENS]
    assert await environment.step(reply(1, right)) == [told]
    end: Any = await environment.step(reply(2, right[:4] + "????"))
    assert (end.reward, end.turn_rewards, end.components) == (0.75, {1: 1.0, 2: 0.5}, {"turn_1": 1.0, "turn_2": 0.5})
    assert right in end.log


@pytest.mark.parametrize(
    ("first", "said", "reward"), [("3, 4, 5", "once more", 1.0), ("3, 9", "begins 3, 4, 5", 1 / 3)]
)
async def test_the_checker_says_what_is_right(first: str, said: str, reward: float) -> None:
    environment = Checked()
    (asked,) = await environment.reset(Task("p7", verifier={"first": 3, "last": 5}))
    assert "from 3 to 5" in asked["content"]
    (told,) = await environment.step(reply(0, first))  # type: ignore[misc]
    assert told["name"] == CHECKER and said in told["content"]
    end = await environment.step(reply(1, "3, 4, 5"))
    assert isinstance(end, End) and end.turn_rewards == {0: pytest.approx(reward), 1: 1.0}
    assert end.reward == pytest.approx((reward + 1.0) / 2)


def test_the_demo_shows_turns_and_tool_time() -> None:
    for each in {preset.environment for preset in AGENT_PRESETS.values()}:
        load_environment(each)
    before = pb.Status()
    status = pb.Status(
        versions=[pb.VersionStatus(requests_running=5, sessions_idle=7), pb.VersionStatus(sessions_idle=2)],
        steps=[pb.StepMetrics(step=0, mean_reward=0.5)],
        counters={"turns_ended": 40.0, "turns_resumed": 20.0},
    )
    console = Console(width=200, record=True, quiet=False)
    with console.capture() as captured:
        console.print(service_view(status, "demo"))
        console.print(service_view(before, "demo"))
    assert captured.get().count("5 sampling, 9 in tool time   turns 40 ended, 20 resumed with their KV") == 1
    assert captured.get().count("tool time") == 1, "a service without sessions"
    assert "turns of sessions ended: 40; 9 sessions are in tool time" in news(before, status)
