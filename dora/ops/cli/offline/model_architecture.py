"""Reads a model's properties from the ``config.json`` of its folder, for any architecture that transformers has.

The parameters are counted on transformers' own module, which is built on the ``meta`` device: without memory, weights
or downloads. The planner computes in bf16, whatever the weights are stored in. KV is counted as of full attention,
which for sliding windows is an upper limit. A model of text and images is planned as its text model.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Final

from dora.data.strict_json import json_object
from dora.errors import InvalidValue
from dora.lab.planning.models import MODELS, ModelSpec, find_model
from dora.system.files import path_of

FIELD: Final = "--model"
CONFIG: Final = "config.json"
LAYERS_MAX: Final = 1024  # the module has Python objects for each
EXPERTS_MAX: Final = 1 << 14
# By any of their names. Without them transformers' defaults would stand for another model.
REQUIRED: Final = (("num_hidden_layers", "num_layers"), ("hidden_size",))
PER_TOKEN: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_NUMBER: Final = re.compile(r"\.(\d+)\.")
_EXPERT: Final = re.compile(r"\.experts\.(\d+)\.")


def planned_model(name: str) -> ModelSpec:
    """The model of that name, of that folder, or of that ``config.json``. Raises InvalidValue if there is none."""
    path = path_of(name, FIELD)
    if name.lower() in MODELS or not (os.sep in name or path.suffix == ".json" or path.exists()):
        return find_model(name)
    return model_of_config(path / CONFIG if path.is_dir() else path)


def model_of_config(file: Path) -> ModelSpec:
    """The properties of the model that ``file`` configures. Raises InvalidValue, naming the file."""
    tree = json_object(file, FIELD)
    for without in ("quantization_config", "compression_config"):
        tree.pop(without, None)
    place = _NamedFile(file)
    with _quiet():
        whole, config = _configs(tree, place)
        module = _module(whole, config, place)
    return _Measured(config, module, place).spec(_name_of(file))


class _NamedFile:
    def __init__(self, file: Path) -> None:
        self.file = file

    def invalid(self, allowed: str) -> InvalidValue:
        return InvalidValue(FIELD, str(self.file), allowed)

    def count(self, config: Any, name: str, most: int = 1 << 31) -> int:
        """Raises InvalidValue unless the field is a whole number from 1 to ``most``."""
        value = getattr(config, name, None)
        if type(value) is not int or not 1 <= value <= most:
            raise self.invalid(f"a configuration whose {name} is a whole number from 1 to {most:,}, not {value!r:.80}")
        return value


class _Measured:
    def __init__(self, config: Any, module: Any, place: _NamedFile) -> None:
        self.config, self.place = config, place
        before, after = module.get_input_embeddings(), module.get_output_embeddings()
        if before is None or after is None:
            raise place.invalid("the configuration of a language model, with embeddings of input and output")
        self.tied = before.weight is after.weight
        # Of a model of text and images, only the decoder of text.
        parts = [*module.get_decoder().named_parameters(prefix="model")]
        parts += [] if self.tied else [*after.named_parameters(prefix="head")]
        once = {id(parameter): name for name, parameter in reversed(parts)}  # some decoders hold the head too
        self.sizes = {name: tuple(parameter.shape) for name, parameter in parts if once[id(parameter)] == name}
        self.vocabulary = int(before.weight.shape[0])
        if not self.vocabulary:
            raise place.invalid("a configuration with a vocabulary")
        self.hidden_dim = place.count(config, "hidden_size")
        self.layers = place.count(config, "num_hidden_layers", LAYERS_MAX)
        self.heads = place.count(config, "num_attention_heads")

    def spec(self, name: str) -> ModelSpec:
        self._check_attention()
        blocks = 1 + max((int(found[1]) for each in self.sizes if (found := _NUMBER.search(each))), default=0)
        in_block: dict[int, int] = {}  # block -> parameters of its experts
        biases = 0
        experts, idle = self._experts()
        for each, size in self.sizes.items():
            if ".experts." in each and (found := _NUMBER.search(each)):
                in_block[int(found[1])] = in_block.get(int(found[1]), 0) + prod(size)
                biases += prod(size) if each.endswith("bias") else 0
        total = sum(map(prod, self.sizes.values())) - idle
        of_experts = sum(in_block.values()) - idle
        chosen = self._chosen(experts) if experts else 0
        latent = getattr(self.config, "kv_lora_rank", None)
        return ModelSpec(
            name=name,
            parameters=float(total),
            active_parameters=float(total - (of_experts * (1 - chosen / experts) if experts else 0)),
            layers=self.layers,
            hidden_dim=self.hidden_dim,
            heads=self.heads,
            kv_heads=self.heads if latent else self._kv_heads(),
            head_dim=self._head_dim(),
            vocabulary=self.vocabulary,
            ffn_dim=self._ffn_dim(experts),
            value_dim=self.place.count(self.config, "v_head_dim") if latent else 0,
            latent_dim=latent + self.place.count(self.config, "qk_rope_head_dim") if latent else 0,
            experts=experts,
            experts_per_token=chosen,
            expert_dim=round((of_experts - biases) / (len(in_block) * experts * 3 * self.hidden_dim)) if experts else 0,
            block_layers=max(1, self.layers // blocks),
            dense_blocks=blocks - len(in_block) if experts else 0,
            tied=self.tied,
        )

    def _check_attention(self) -> None:
        """Raises InvalidValue unless each layer has attention whose KV grows by the same for each token."""
        kinds = sorted({str(kind) for kind in getattr(self.config, "layer_types", None) or []})
        other = [kind for kind in kinds if not kind.endswith("attention") or kind.startswith("linear")]
        with_attention = {
            found[1] for each in self.sizes if "attn" in each or "attention" in each if (found := _NUMBER.search(each))
        }
        of_all = {found[1] for each in self.sizes if (found := _NUMBER.search(each))}
        if other or with_attention != of_all:
            said = ", ".join(other) or "layers without attention"
            raise self.place.invalid(f"the configuration of a model with attention in each layer, not {said}")
        keys = [size[0] for each, size in self.sizes.items() if each.endswith("k_proj.weight")]
        if keys and not getattr(self.config, "kv_lora_rank", None):
            per_layer = self._kv_heads() * self._head_dim()
            if any(size != per_layer for size in keys):
                sizes = f"{per_layer:,} values, not {min(keys):,} to {max(keys):,}"
                raise self.place.invalid(f"the configuration of a model whose layers all have keys of {sizes}")

    def _head_dim(self) -> int:
        if getattr(self.config, "kv_lora_rank", None):
            return self.place.count(self.config, "qk_nope_head_dim") + self.place.count(self.config, "qk_rope_head_dim")
        if getattr(self.config, "head_dim", None) is None:
            return max(1, self.hidden_dim // self.heads)
        return self.place.count(self.config, "head_dim")

    def _kv_heads(self) -> int:
        if getattr(self.config, "multi_query", False) and not getattr(self.config, "new_decoder_architecture", False):
            return 1
        for name in ("num_key_value_heads", "num_kv_heads"):
            if getattr(self.config, name, None) is not None:
                return self.place.count(self.config, name)
        return self.heads

    def _experts(self) -> tuple[int, int]:
        """Counts the experts of a block that compute, and the parameters that transformers allocates for the others.

        LongCat-Flash's experts that do nothing have such parameters there.
        """
        apart = [int(found[1]) + 1 for each in self.sizes if (found := _EXPERT.search(each))]
        if apart:
            return max(apart), 0
        stacked = [size for each, size in self.sizes.items() if ".experts." in each and len(size) > 1]
        if not stacked:
            return 0, 0
        experts = min(size[0] for size in stacked)
        return experts, sum(prod(size) // size[0] * (size[0] - experts) for size in stacked)

    def _chosen(self, experts: int) -> float:
        name = next((each for each in PER_TOKEN if getattr(self.config, each, None) is not None), PER_TOKEN[0])
        idle = getattr(self.config, "zero_expert_num", 0) or 0
        chosen = self.place.count(self.config, name, experts + idle)
        return chosen * experts / (experts + idle)

    def _ffn_dim(self, experts: int) -> int:
        """The mean width of the feed-forward networks that every token uses, as of gated ones with three matrices."""
        dense = sum(
            prod(size)
            for each, size in self.sizes.items()
            if len(size) == 2
            and _NUMBER.search(each)
            and not any(part in each for part in ("attn", "attention", ".experts.", "norm"))
            and not (experts and ("router" in each or each.endswith("gate.weight")))
        )
        return round(dense / (3 * self.hidden_dim * self.layers))


def _configs(tree: Mapping[str, Any], place: _NamedFile) -> tuple[Any, Any]:
    """Returns the configurations of the model and of its text model. Raises InvalidValue if transformers lacks it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = tree.get("model_type")
    if not isinstance(kind, str):
        raise place.invalid("a configuration with a model_type")
    if kind not in CONFIG_MAPPING:  # such as a copy of DeepSeek-V3's with code of its own
        kind = _kind_of_architecture(tree.get("architectures")) or kind
    if kind not in CONFIG_MAPPING:
        raise place.invalid(f"the configuration of a model that the installed transformers has, not of {kind:.80}")
    _check_layers(tree, place)  # before transformers writes lists with an entry for each
    own = {name: value for name, value in tree.items() if name not in ("model_type", "auto_map")}
    try:
        whole = CONFIG_MAPPING[kind].from_dict(own)
        config = whole.get_text_config(decoder=True)
    except Exception as error:  # each architecture checks its own fields, by exceptions of many kinds
        raise place.invalid(f"a configuration that transformers reads ({_told(error)})") from error
    fields: Any = tree if config is whole else tree.get("text_config", tree)
    for names in REQUIRED:
        known = {*names, *(config.attribute_map.get(name, name) for name in names)}
        if not isinstance(fields, Mapping) or not known & fields.keys():
            raise place.invalid(f"a configuration with {names[0]}")
    if config is not whole and "tie_word_embeddings" in tree:
        config.tie_word_embeddings = bool(tree["tie_word_embeddings"])
    config.allow_global_per_layer_attribute_access = True  # the sizes of the layers are compared below
    return whole, config


def _check_layers(tree: Mapping[str, Any], place: _NamedFile) -> None:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            _check_layers(value, place)
        elif "layer" in name and type(value) is int and value > LAYERS_MAX:
            raise place.invalid(f"a configuration whose {name:.80} is at most {LAYERS_MAX:,}, not {value:,}")


def _kind_of_architecture(architectures: Any) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = architectures if isinstance(architectures, list) else []
    return next((kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in names), "")


def _module(whole: Any, config: Any, place: _NamedFile) -> Any:
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    for name in ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"):
        if getattr(config, name, None):
            place.count(config, name, EXPERTS_MAX)
    try:
        with torch.device("meta"):
            if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
                return AutoModelForCausalLM.from_config(config)
            return AutoModelForImageTextToText.from_config(whole)
    except Exception as error:  # each architecture checks its own fields, by exceptions of many kinds
        raise place.invalid(f"the configuration of a language model of transformers ({_told(error)})") from error


def _name_of(file: Path) -> str:
    whole = file.absolute()
    return whole.parent.name if whole.name == CONFIG and whole.parent.name else whole.stem


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
