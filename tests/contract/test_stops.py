"""Stop strings and stop tokens end a response at the same place in all engines. Moved requests: ``test_states``."""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from dora.data.types import RequestSpec
from dora.errors import InvalidValue
from dora.worker.engine import RolloutEngine
from tests.contract.driver import GREEDY, SAMPLED, Response, VersionFolder, make_request, run
from tests.refusals import refused

SPAN = (8, 13)  # tokens of the free response that a stop string is made of


@pytest.fixture
def tokenizer(version_folder: VersionFolder) -> Tokenizer:
    folder: Path = version_folder(1)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def first_end(tokenizer: Tokenizer, token_ids: list[int], stops: tuple[str, ...], min_tokens: int = 0) -> int:
    """Returns the number of tokens at which the text, decoded from its beginning, first contains a stop string."""
    for end in range(max(1, min_tokens), len(token_ids) + 1):
        before, text = (tokenizer.decode(token_ids[:n], skip_special_tokens=False) for n in (end - 1, end))
        if any(text.count(stop) > before.count(stop) for stop in stops):
            return end
    return len(token_ids)


def stopped(request: RequestSpec, *stops: str, min_tokens: int = 0) -> RequestSpec:
    return replace(request, sampling=replace(request.sampling, stop=stops, min_tokens=min_tokens))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_stop_string_ends_a_response_and_belongs_to_it(
    engine: RolloutEngine, tokenizer: Tokenizer, sampling: object
) -> None:
    request = make_request(1, sampling)  # type: ignore[arg-type]
    free = run(engine, [request])["r1"]
    stop = tokenizer.decode(free.token_ids[slice(*SPAN)], skip_special_tokens=False)
    end = first_end(tokenizer, free.token_ids, (stop,))
    assert SPAN[0] < end <= SPAN[1]
    found = run(engine, [stopped(request, "\N{SNOWMAN}", stop)])["r1"]
    assert found == Response(free.token_ids[:end], free.logprobs[:end], "stop", stop)
    assert engine.load().kv_used_tokens == 0 and not engine.has_work()


def test_a_stop_string_counts_from_min_tokens_on(engine: RolloutEngine, tokenizer: Tokenizer) -> None:
    request = make_request(1, GREEDY)
    free = run(engine, [request])["r1"]
    stop = tokenizer.decode(free.token_ids[5:6], skip_special_tokens=False)
    for min_tokens in (0, 6, 7, 30):
        end = first_end(tokenizer, free.token_ids, (stop,), min_tokens)
        found = run(engine, [stopped(request, stop, min_tokens=min_tokens)])["r1"]
        assert found.token_ids == free.token_ids[:end]


def test_a_stop_token_goes_before_a_stop_string_that_it_completes(engine: RolloutEngine, tokenizer: Tokenizer) -> None:
    request = make_request(1, GREEDY)
    free = run(engine, [request])["r1"]
    texts = {n: tokenizer.decode(free.token_ids[n - 3 : n], skip_special_tokens=False) for n in range(4, 40)}
    end, stop = next(
        (end, text)
        for end, text in texts.items()
        if free.token_ids[end - 1] not in free.token_ids[: end - 1]
        and first_end(tokenizer, free.token_ids, (text,)) == end
    )
    both = replace(request.sampling, stop=(stop,), stop_token_ids=(free.token_ids[end - 1],))
    found = run(engine, [replace(request, sampling=both)])["r1"]
    assert (found.token_ids, found.finish_reason, found.stop) == (free.token_ids[:end], "stop", "")


def test_stops_that_no_engine_could_watch_for_are_refused(engine: RolloutEngine) -> None:
    good = make_request(1)
    for change, field in (
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x" * 129,)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"),
        ({"stop_token_ids": (64,)}, "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ):
        with refused(InvalidValue, field=f"sampling.{field}"):
            engine.add(replace(good, sampling=replace(good.sampling, **change)))  # type: ignore[arg-type]
    assert not engine.has_work()
