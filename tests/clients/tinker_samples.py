"""A program for Tinker's client in an environment of its own, without DORA: samples as its arguments say.

Argument: a JSON object with ``model_path``, ``prompts`` (token ids), ``num_samples``, ``params``, further ``options``
of ``sample``, and prompts to be ``scored``: all their tokens, then the last one alone. Prints a JSON object with the
results, or with the error.
"""

import json
import sys
from typing import Any

import tinker
from tinker import types


def shown(result: types.SampleResponse) -> list[dict[str, Any]]:
    return [
        {
            "tokens": each.tokens,
            "logprobs": each.logprobs,
            "stop_reason": each.stop_reason,
            "id": each.sequence_id,
            "prompt_logprobs": result.prompt_logprobs,
        }
        for each in result.sequences
    ]


def sampled(asked: dict[str, Any]) -> dict[str, Any]:
    client = tinker.ServiceClient()
    models = [each.model_name for each in client.get_server_capabilities().supported_models]
    sampler = client.create_sampling_client(model_path=asked.get("model_path", "tinker://run/sampler_weights/policy"))
    sampler = sampler.result() if hasattr(sampler, "result") else sampler
    futures = [
        sampler.sample(
            types.ModelInput.from_ints(prompt),
            asked.get("num_samples", 1),
            types.SamplingParams(**asked.get("params", {})),
            **asked.get("options", {}),
        )
        for prompt in asked["prompts"]
    ]
    found = [shown(each.result()) for each in futures]
    scored = [
        sampler.compute_logprobs(types.ModelInput.from_ints(prompt), **last).result()
        for prompt in asked.get("scored", ())
        for last in ({}, {"prompt_logprobs_last_n": 1})
    ]
    client.close("success").result()
    return {"models": models, "base_model": sampler.get_base_model(), "samples": found, "scored": scored}


def main() -> None:
    try:
        print(json.dumps(sampled(json.loads(sys.argv[1]))))
    except tinker.TinkerError as error:
        category = str(getattr(error, "category", "")) or (getattr(error, "body", None) or {}).get("category", "")
        print(json.dumps({"error": type(error).__name__, "message": str(error), "category": category}))


if __name__ == "__main__":
    main()
