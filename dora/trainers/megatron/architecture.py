"""Hugging Face models as Megatron's GPTModel: dense decoders and mixtures of experts with rotary positions."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from dora.data.strict_json import json_object
from dora.data.types import RoutingShape
from dora.errors import InvalidValue, one_of
from dora.models.experts import experts_of, routing_of
from dora.trainers.megatron.attention import PackedAttention, PackedRotary
from dora.trainers.megatron.layout import Place, own_device
from dora.trainers.megatron.names import Shape, padded_vocabulary

Layers = Literal["auto", "local", "te"]
_FAMILIES: Final = ("llama", "qwen2", "qwen3", "qwen3_moe")
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The properties of a model, from config.json, for training. Raises InvalidValue for an unsupported model."""

    config: Mapping[str, Any]
    folder: Path

    def __post_init__(self) -> None:
        family = str(self.config.get("model_type"))
        if family not in _FAMILIES:
            raise InvalidValue("model: model_type", family, one_of(family, _FAMILIES))
        if self.config.get("hidden_act") != "silu":
            raise InvalidValue("model: hidden_act", self.config.get("hidden_act"), "silu")
        if self.config.get("use_sliding_window"):
            raise InvalidValue("model: use_sliding_window", True, "false: every layer must read the whole row")
        rope_type = self._rope.get("rope_type", "default")
        if rope_type != "default":
            raise InvalidValue("model: rope_type", rope_type, "default")
        if self.config.get("mlp_only_layers") or self.config.get("decoder_sparse_step", 1) != 1:
            raise InvalidValue("model: mlp_only_layers", "given", "absent: every layer must have experts")

    @classmethod
    def of(cls, folder: Path) -> "Architecture":
        return cls(json_object(folder / "config.json", "model"), folder)

    @property
    def experts(self) -> int:
        """Experts in each layer; 0 for a dense model."""
        found = experts_of(self.config, "model")
        return found[0] if found is not None else 0

    @property
    def routing(self) -> RoutingShape:
        """The routing. It has no layers for a dense model."""
        return routing_of(self.config, "model") or RoutingShape(0, 0, 0)

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def shape(self) -> Shape:
        heads = int(self.config["num_attention_heads"])
        return Shape(
            query_heads=heads,
            kv_heads=int(self.config.get("num_key_value_heads") or heads),
            vocab_size=self.vocab_size,
            tied=bool(self.config.get("tie_word_embeddings", False)),
        )

    @property
    def _rope(self) -> Mapping[str, Any]:
        return self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}

    @property
    def rope_theta(self) -> float:
        return float(self._rope.get("rope_theta", self.config.get("rope_theta", 10000.0)))

    def megatron(self, place: Place, dtype: torch.dtype) -> dict[str, Any]:
        """The fields of Megatron's TransformerConfig."""
        layout, settings, family = place.layout, self.config, self.config["model_type"]
        if settings["num_attention_heads"] % layout.tp:
            raise InvalidValue("--tp", layout.tp, f"a divisor of the model's {settings['num_attention_heads']} heads")
        found: dict[str, Any] = {
            "num_layers": settings["num_hidden_layers"],
            "hidden_size": settings["hidden_size"],
            "ffn_hidden_size": settings["intermediate_size"],
            "num_attention_heads": settings["num_attention_heads"],
            "num_query_groups": self.shape.kv_heads,
            "kv_channels": settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"],
            "layernorm_epsilon": settings["rms_norm_eps"],
            "normalization": "RMSNorm",
            "qk_layernorm": family.startswith("qwen3"),
            "add_bias_linear": False,
            "add_qkv_bias": family == "qwen2" or bool(settings.get("attention_bias", False)),
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "bf16": dtype == torch.bfloat16,
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "context_parallel_size": layout.cp,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp,
            "sequence_parallel": layout.tp > 1 and self.experts > 0,  # required by Megatron in this case
            "variable_seq_lengths": layout.pp > 1,
            "moe_token_dispatcher_type": "alltoall",  # the only one that supports sequences of any length
            "calculate_per_token_loss": True,  # gradients are sums; the learner divides them once
            "use_cpu_initialization": True,  # the weights are loaded, so the GPU's random numbers are not needed
            "perform_initialization": False,
        }
        if self.experts:
            if self.experts % layout.ep:
                raise InvalidValue("--ep", layout.ep, f"a divisor of the model's {self.experts} experts")
            found |= {
                "num_moe_experts": self.experts,
                "moe_ffn_hidden_size": settings["moe_intermediate_size"],
                "moe_router_topk": settings["num_experts_per_tok"],
                # softmax over all experts, then normalised to 1, equals softmax over the chosen ones
                "moe_router_pre_softmax": not settings.get("norm_topk_prob", False),
                "moe_router_load_balancing_type": "none",  # the objective is the whole loss
                "moe_router_dtype": "fp32",
            }
        return found


@dataclass(frozen=True, slots=True)
class Built:
    module: Any  # GPTModel
    architecture: Architecture
    place: Place
    dtype: torch.dtype

    @property
    def first_layer(self) -> int:
        """The index in the model of this rank's first layer."""
        return int(self.module.decoder.layers[0].layer_number) - 1

    @property
    def first_expert(self) -> int:
        return self.architecture.experts // self.place.layout.ep * self.place.ep


class RmsNorm(torch.nn.RMSNorm):
    """Megatron's local norm, extended to ranks that share a sequence: their gradients of the weight are summed."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **others: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel


def _stage(spec: Any, config: Any, place: Place, final_norm: type | None) -> Any:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    if final_norm is None:
        return spec
    layers = get_num_layers_to_build(config, pp_rank=place.pp)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=final_norm)


def build(architecture: Architecture, place: Place, dtype: str = "float32", layers: Layers = "auto") -> Built:
    """Builds a GPTModel whose weights are not loaded yet.

    ``layers`` are Megatron's own (``local``), Transformer Engine's (``te``), or the latter if it is installed.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    te = HAVE_TE if layers == "auto" else layers == "te"
    fields = architecture.megatron(place, _DTYPES[dtype])
    fields["transformer_impl"] = "transformer_engine" if te else "local"
    options: dict[str, Any] = {"num_experts": architecture.experts or None, "qk_layernorm": fields["qk_layernorm"]}
    if te:
        fields["moe_grouped_gemm"] = options["moe_grouped_gemm"] = bool(architecture.experts)
        spec = get_gpt_layer_with_transformer_engine_spec(**options)
    else:
        spec = get_gpt_layer_local_spec(**options, normalization="RMSNorm")
        attention = spec.submodules.self_attention.submodules
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RmsNorm
        if options["qk_layernorm"]:
            attention.q_layernorm = attention.k_layernorm = RmsNorm
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    config = TransformerConfig(**fields)
    module = GPTModel(
        config=config,
        transformer_layer_spec=_stage(spec, config, place, None if te else RmsNorm),
        vocab_size=padded_vocabulary(architecture.vocab_size, place.layout.tp),
        max_sequence_length=architecture.config["max_position_embeddings"],
        pre_process=place.pp == 0,
        post_process=place.is_last_stage,
        share_embeddings_and_output_weights=architecture.shape.tied,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,
    ).to(own_device())
    module.rotary_pos_emb = PackedRotary(module.rotary_pos_emb)
    return Built(module, architecture, place, _DTYPES[dtype])
