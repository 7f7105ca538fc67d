"""A model's weights in the shape in which the forward pass reads them: fused, on one device, in one dtype."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvaudit.engines.embedded.rotary import rope_type_of, rotary_frequencies
from kvaudit.errors import EngineError, UsageError
from kvaudit.models.files import ModelFiles
from kvaudit.models.gguf_file import check_gguf, gguf_end_ids, parsed_once
from kvaudit.models.quiet import quietly

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Linear:
    """`weight` [out, in] and `bias` [out] or None."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. `qkv` has the rows of all query heads, then key heads, then value heads; `gate_up` gate
    rows, then up rows. Norms are [hidden], `q_norm` and `k_norm` (Qwen3) [head_dim].
    """

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model. `embedding` and `head` are [vocabulary, hidden] and one tensor where the model ties them.

    `inverse_frequencies` is float32 [head_dim / 2], `rotary_scale` the factor on cos and sin, `end_ids` every
    token id that ends an answer.
    """

    family: str
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    inverse_frequencies: Tensor
    rotary_scale: float
    max_positions: int
    end_ids: frozenset[int]
    vocabulary: int


def load_weights(files: ModelFiles, dtype: torch.dtype, device: torch.device, end_ids: Collection[int] = ()) -> Weights:
    """A model's weights on `device` in `dtype`. `end_ids` (the tokenizer's) end an answer beside the model's own.

    Each layer of the loaded model is freed once it is converted. Raises UsageError for a model that the forward pass
    does not compute, EngineError for files that are damaged or incomplete, or a model that does not fit.
    """
    weight_files = files.weight_files
    with quietly(f"model {files.name!r}"), parsed_once():
        if files.gguf_file is not None:
            check_gguf(weight_files[0])
        config = _config(files)
        check_supported(config)
        hf_model = _hf_model(files, config, dtype)
        own_ends = _end_ids(hf_model) if files.gguf_file is None else gguf_end_ids(weight_files[0])
        try:
            return _converted(hf_model, _handed_over(hf_model.model), dtype, device, own_ends.union(end_ids))
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"model {files.name!r} does not fit on {device} in {dtype}", "use --dtype bfloat16 or --device cpu"
            ) from error


def weights_of(hf_model: Any, dtype: torch.dtype, device: torch.device) -> Weights:
    """The weights of a transformers model, which stays as it is and may share memory with them.

    Raises UsageError for a model that the forward pass does not compute.
    """
    check_supported(hf_model.config)
    return _converted(hf_model, hf_model.model.layers, dtype, device, _end_ids(hf_model))


def check_supported(config: Any) -> None:
    """Raise UsageError, naming the setting, for a transformers config that the forward pass does not compute."""
    _check_family(config.model_type)
    if config.hidden_act != "silu":
        raise UsageError(f"activation {config.hidden_act!r} is not supported", "supported: silu")
    rope_type_of(config)
    window = _active_window(config)
    if window is not None and window < config.max_position_embeddings:
        raise UsageError(
            f"sliding-window attention ({window} of {config.max_position_embeddings} positions) is not supported",
            "use a model with full attention, or one whose window covers every position",
        )
    quantized = getattr(config, "quantization_config", None)
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        method = str(getattr(method, "value", method))
        if method != "gguf":
            raise UsageError(
                f"weights quantised by {method!r} are not supported", "use unquantised safetensors or a GGUF file"
            )


def _config(files: ModelFiles) -> Any:
    from transformers import AutoConfig, PreTrainedConfig

    if files.gguf_file is None:
        settings, _ = PreTrainedConfig.get_config_dict(files.folder, local_files_only=True)
        _check_family(settings.get("model_type"))
    return AutoConfig.from_pretrained(
        files.folder, gguf_file=files.gguf_file, local_files_only=True, trust_remote_code=False
    )


def _hf_model(files: ModelFiles, config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    hf_model, report = AutoModelForCausalLM.from_pretrained(
        files.folder,
        config=config,
        gguf_file=files.gguf_file,
        dtype=dtype,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    # transformers fills what a file lacks with random numbers, and passes over what it does not know.
    absent = sorted(report["missing_keys"])
    unread = sorted(key for key in report["unexpected_keys"] if ".layers." in key)
    if absent:
        raise EngineError(f"model {files.name!r}: weights {absent[0]} (of {len(absent)} in all) are not in its files")
    if unread:
        raise UsageError(f"model {files.name!r}: weights {unread[0]} are not supported in a {config.model_type} model")
    return hf_model


def _handed_over(base: Any) -> Iterator[nn.Module]:
    """The layers of a transformers model, which lets go of each, so that it is freed once it is converted."""
    layers = list(base.layers)
    base.layers = nn.ModuleList()
    while layers:
        yield layers.pop(0)


def _check_family(model_type: object) -> None:
    if model_type not in FAMILIES:
        raise UsageError(f"model type {model_type!r} is not supported", f"supported: {', '.join(FAMILIES)}")


def _active_window(config: Any) -> int | None:
    """The sliding window that some layer of the model attends in, None when all attend to everything."""
    window: int | None = getattr(config, "sliding_window", None)
    if config.model_type == "mistral":
        return window
    return window if "sliding_attention" in (getattr(config, "layer_types", None) or ()) else None


def _converted(
    hf_model: Any, layers: Iterable[nn.Module], dtype: torch.dtype, device: torch.device, end_ids: frozenset[int]
) -> Weights:
    config = hf_model.config
    base = hf_model.model
    kind = {"dtype": dtype, "device": device}
    embedding = base.embed_tokens.weight.detach().to(**kind)
    tied = hf_model.lm_head.weight is base.embed_tokens.weight
    frequencies, scale = rotary_frequencies(config)
    return Weights(
        family=config.model_type,
        embedding=embedding,
        layers=tuple(_layer(layer, dtype, device) for layer in layers),
        norm=base.norm.weight.detach().to(**kind),
        head=embedding if tied else hf_model.lm_head.weight.detach().to(**kind),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        norm_eps=config.rms_norm_eps,
        inverse_frequencies=frequencies.to(device),
        rotary_scale=scale,
        max_positions=config.max_position_embeddings,
        end_ids=end_ids,
        vocabulary=embedding.shape[0],
    )


def _layer(layer: nn.Module, dtype: torch.dtype, device: torch.device) -> LayerWeights:
    parts = {name: part.detach() for name, part in layer.named_parameters()}
    packed = [name for name, part in parts.items() if not part.is_floating_point()]
    if packed:
        raise UsageError(f"packed weights ({packed[0]}) are not supported", "use unquantised safetensors")

    def vector(name: str) -> Tensor | None:
        part = parts.pop(name, None)
        return None if part is None else part.to(device=device, dtype=dtype)

    def norm(name: str) -> Tensor:
        return parts.pop(f"{name}.weight").to(device=device, dtype=dtype)

    def fused(*names: str) -> Linear:
        weights = [parts.pop(f"{name}.weight") for name in names]
        biases = [parts.pop(f"{name}.bias") for name in names if f"{name}.bias" in parts]
        return Linear(_stacked(weights, dtype, device), _stacked(biases, dtype, device) if biases else None)

    converted = LayerWeights(
        input_norm=norm("input_layernorm"),
        qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=vector("self_attn.q_norm.weight"),
        k_norm=vector("self_attn.k_norm.weight"),
        out=fused("self_attn.o_proj"),
        post_norm=norm("post_attention_layernorm"),
        gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
        down=fused("mlp.down_proj"),
    )
    if parts:
        raise UsageError(f"layers with {', '.join(sorted(parts))} are not supported", "this model adds to its family")
    return converted


def _stacked(parts: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(device=device, dtype=dtype)


def _end_ids(hf_model: Any) -> frozenset[int]:
    found: set[int] = set()
    for source in (hf_model.config, hf_model.generation_config):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return frozenset(found)
