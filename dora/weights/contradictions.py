"""Contradictions in a model folder, by which an engine and a trainer would compute different logprobs in silence.

``check_folder`` refuses those that change what is computed, and returns the ones that may be intended as warnings.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dora.data.strict_json import json_object
from dora.errors import InvalidValue
from dora.models.ends import ends_by_file, merged_ends, token_ids
from dora.models.text_part import text_part
from dora.weights.reference import HEAD, embedding_of_tied, is_tied, weight_files
from dora.weights.tied_head import Placed, are_equal, placed_tensors

_HEADS: Final = ("lm_head", "embed_out", "output", "score", "head")  # parts of names of output layers
_DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_SAME_ROPE: Final = {"mrope": "default", "su": "longrope"}  # old names of kinds of rope
_ROPE: Final = ("rope_parameters", "rope_scaling")
# Defaults of generation_config.json that change what transformers' generate() samples, and the values that do not.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "typical_p"), (None, 1.0)),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens"), (None, 0)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"), (None, [])),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), (None,)),
}


def check_folder(folder: Path) -> tuple[str, ...]:
    """Returns warnings about a model folder in sentences. Raises InvalidValue, naming both sides of a contradiction."""
    config = json_object(folder / "config.json", "--model")
    _check_rope(folder, config)
    placed = placed_tensors(folder / file for file in weight_files(folder))
    _check_head(folder, config, placed)
    return (
        *_of_ends(folder, config),
        *_of_tokens(folder, config),
        *_of_dtype(folder, config, placed),
        *_of_defaults(folder),
    )


def _refuse(folder: Path, one: str, other: str, remedy: str) -> None:
    raise InvalidValue("--model", str(folder), f"a folder that agrees with itself: {one}, but {other}; {remedy}")


def _check_rope(folder: Path, config: Mapping[str, Any]) -> None:
    """Checks rope settings under a new and an old name: readers prefer different ones."""
    for part in (config, text_part(config)):
        new, old = (part.get(name) for name in _ROPE)
        settings = [each for each in (new, old) if isinstance(each, dict)]
        for each in settings:
            kinds = [each[key] for key in ("rope_type", "type") if each.get(key) is not None]
            if len({_SAME_ROPE.get(str(kind), str(kind)) for kind in kinds}) > 1:
                _refuse(
                    folder, f"rope_type is {kinds[0]!r}", f"type is {kinds[1]!r}", "keep the right one in config.json"
                )
        if len(settings) == 2:
            for key in sorted(settings[0].keys() & settings[1].keys()):
                if settings[0][key] != settings[1][key]:
                    one, other = (f"{name}.{key} is {each[key]!r}" for name, each in zip(_ROPE, settings, strict=True))
                    _refuse(folder, one, other, "remove one of them from config.json")
        theta, inner = part.get("rope_theta"), new.get("rope_theta") if isinstance(new, dict) else None
        if theta is not None and inner is not None and theta != inner:
            one, other = f"rope_theta is {theta!r}", f"rope_parameters.rope_theta is {inner!r}"
            _refuse(folder, one, other, "remove one of them from config.json")


def _check_head(folder: Path, config: Mapping[str, Any], placed: Mapping[str, Placed]) -> None:
    tied, names = is_tied(config), {name: tensor for name, (_, _, tensor) in placed.items() if name != HEAD}
    embedding = embedding_of_tied(names)
    if tied and embedding is not None and HEAD in placed and not are_equal(placed[HEAD], placed[embedding]):
        remedy = "set tie_word_embeddings to false, or remove the head from the checkpoint"
        _refuse(folder, "tie_word_embeddings is true", f"{HEAD} differs from {embedding}", remedy)
    if tied is False and embedding is not None and not any(part in name for name in placed for part in _HEADS):
        remedy = "set it to true, or add the head to the checkpoint"
        _refuse(folder, "tie_word_embeddings is false", f"the checkpoint has no {HEAD}", remedy)


def _vocab_size(config: Mapping[str, Any]) -> int:
    size = config.get("vocab_size", text_part(config).get("vocab_size", 0))
    return size if type(size) is int else 0


def _of_ends(folder: Path, config: Mapping[str, Any]) -> list[str]:
    by_file, vocab_size = ends_by_file(folder), _vocab_size(config)
    warnings = []
    if len(set(map(frozenset, by_file.values()))) > 1:
        said = ", ".join(f"{list(ids)} in {name}" for name, ids in by_file.items())
        warnings.append(f"the files name different end tokens, and each of them ends a response: {said}")
    outside = [token_id for token_id in merged_ends(by_file) if vocab_size and token_id >= vocab_size]
    if outside:
        warnings.append(f"the end tokens {outside} are outside the vocabulary of {vocab_size:,}: they end no response")
    if not by_file:
        warnings.append("no file names an end token: responses end at rollout.max_tokens, or at a stop of yours")
    return warnings


def _of_tokens(folder: Path, config: Mapping[str, Any]) -> list[str]:
    vocab_size = _vocab_size(config)
    if not vocab_size or not (folder / "tokenizer.json").is_file():
        return []
    outside = sorted(text for text, token_id in token_ids(folder).items() if token_id >= vocab_size)
    if not outside:
        return []
    shown = ", ".join(map(repr, outside[:3])) + (" and others" if len(outside) > 3 else "")
    return [f"tokenizer.json has tokens outside the model's vocabulary of {vocab_size:,}, refused in prompts: {shown}"]


def _of_dtype(folder: Path, config: Mapping[str, Any], placed: Mapping[str, Placed]) -> list[str]:
    said = config.get("dtype") or config.get("torch_dtype")
    if config.get("dtype") and config.get("torch_dtype") and config["dtype"] != config["torch_dtype"]:
        _refuse(
            folder, f"dtype is {config['dtype']!r}", f"torch_dtype is {config['torch_dtype']!r}", "remove one of them"
        )
    expected = _DTYPES.get(str(said))
    content: dict[str, int] = {}
    for _, _, tensor in placed.values():
        content[tensor.dtype] = content.get(tensor.dtype, 0) + tensor.content_bytes
    most = max(content, key=lambda dtype: content[dtype], default=None)
    if expected is None or most is None or most == expected or most not in _DTYPES.values():
        return []
    return [f"config.json says {said}, but the weights are {most}: versions are published as {most}"]


def _of_defaults(folder: Path) -> list[str]:
    file = folder / "generation_config.json"
    if not file.is_file():
        return []
    said = json_object(file, "--model")
    changed = [f"{name} = {said[name]!r}" for name in _NEUTRAL if name in said and said[name] not in _NEUTRAL[name]]
    if not changed:
        return []
    return [f"generation_config.json sets {', '.join(changed)}: not applied, as only the settings of rollout sample"]
