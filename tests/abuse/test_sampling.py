"""The record of sampling agrees with the sampling; other requests are refused."""

from dataclasses import replace

import pytest

from dora.config import RolloutConfig, load_config, validated
from dora.data.sampling import DOMAINS, check_sampling, effective
from dora.data.types import Prompt, RequestSpec, SamplingParams
from dora.errors import InvalidValue
from dora.orchestrator.rollout.prompt_check import PromptCheck
from dora.orchestrator.rollout.responses.buffer import sampling_of
from tests.refusals import refused

CHECK = PromptCheck(validated({"prompts": "none"}), vocab_size=64)


@pytest.mark.parametrize("temperature", [0.001, 0.005, 0.0099, 1e-9, 2.01, 9.0])
def test_a_temperature_that_the_engine_would_not_sample_at_is_refused(temperature: float) -> None:
    with refused(InvalidValue, field="prompt p: sampling.temperature"):
        CHECK.checked(Prompt("p", "", (1,), sampling={"temperature": temperature}))
    with refused(InvalidValue, field="rollout.temperature"):
        load_config(None, [f"rollout.temperature={temperature}"])
    with refused(InvalidValue, field="sampling.temperature"):
        check_sampling(SamplingParams(temperature=temperature))


def test_at_temperature_0_the_record_has_no_truncation_as_the_engine_has_none() -> None:
    rollout = RolloutConfig(temperature=0.0, top_p=0.5, top_k=3, min_p=0.25)
    sampling = sampling_of(rollout, Prompt("p", "", (1,)))
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 0, 0.0)
    assert sampling_of(rollout, Prompt("p", "", (1,), sampling={"temperature": 1.0})).top_k == 3


def test_the_stops_of_a_service_are_those_of_a_prompt_that_has_none() -> None:
    rollout = RolloutConfig(stop=("END",), stop_token_ids=(7,))
    assert sampling_of(rollout, Prompt("p", "", (1,))).stop == ("END",)
    own = sampling_of(rollout, Prompt("p", "", (1,), sampling={"stop": ("\n",), "stop_token_ids": ()}))
    assert (own.stop, own.stop_token_ids) == (("\n",), ())
    for wrong, field, value in (
        ('stop=[""]', "stop.0", ""),
        ("stop=[3]", "stop.0", 3),
        ("stop=END", "stop", "END"),
        ("stop_token_ids=[-1]", "stop_token_ids.0", -1),
        ("stop_token_ids=[true]", "stop_token_ids.0", True),
    ):
        with refused(InvalidValue, field=f"rollout.{field}", value=value):
            load_config(None, [f"rollout.{wrong}"])
    with refused(
        InvalidValue, field="prompt p: sampling.stop_token_ids", value=64, names=("0", "63")
    ):  # the vocabulary's end is known later
        CHECK.checked(Prompt("p", "", (1,), sampling={"stop_token_ids": (3, 64)}))


def test_vllm_takes_stop_tokens_beside_the_models_own_and_no_stop_texts() -> None:
    """Stop texts are watched for outside it: it is given no tokenizer, and would refuse them."""
    from dora.worker.vllm.requests import to_vllm  # here: it takes seconds

    sampling = SamplingParams(stop=("END",), stop_token_ids=(7, 5))
    for ignore_eos, expected in ((False, [2, 5, 7]), (True, [5, 7])):
        request = RequestSpec("r", 0, (1,), replace(sampling, ignore_eos=ignore_eos))
        taken = to_vllm(request, "e", (2,)).sampling_params
        assert taken.stop_token_ids == expected and taken.stop == [] and taken.output_text_buffer_length == 0


def test_vllm_takes_every_parameter_as_it_is_given() -> None:
    """At the edges of every domain: what vLLM would alter or refuse, the boundary refuses."""
    from dora.worker.vllm.requests import to_vllm  # here: it takes seconds

    for name, domain in DOMAINS.items():
        for value in (domain.least, domain.most, 0.01, 0.011):
            chosen = {name: domain.kind(value), **({"max_tokens": 1 << 22} if name == "min_tokens" else {})}
            sampling = effective(SamplingParams(**chosen))
            try:
                check_sampling(sampling)
            except InvalidValue:
                continue
            taken = to_vllm(RequestSpec("r", 0, (1,), sampling), "e", ()).sampling_params
            assert all(getattr(taken, each) == getattr(sampling, each) for each in DOMAINS if each != "ignore_eos")
