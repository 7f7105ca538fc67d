from __future__ import annotations

import gc
import json
import weakref
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILY_SETTINGS, tiny_config, tiny_model

from kvaudit.engines.embedded import weights as weights_module
from kvaudit.engines.embedded.weights import (
    LayerWeights,
    Linear,
    Weights,
    check_supported,
    load_weights,
    weights_of,
)
from kvaudit.errors import EngineError, UsageError
from kvaudit.models.files import ModelFiles, resolve_model, weight_digest

CPU = torch.device("cpu")
families = pytest.mark.parametrize("family", FAMILY_SETTINGS)


def tensors(part: Weights | LayerWeights | Linear) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, Linear):
            found += tensors(value)
        elif field.name == "layers":
            found += [tensor for layer in value for tensor in tensors(layer)]
    return found


def saved(model: Any, folder: Path, **options: Any) -> ModelFiles:
    model.save_pretrained(folder, **options)
    return resolve_model(str(folder))


@families
def test_projections_are_fused_in_order(family: str) -> None:
    model = tiny_model(family)

    weights = weights_of(model, torch.float32, CPU)

    assert len(weights.layers) == 3
    for ours, theirs in zip(weights.layers, model.model.layers, strict=True):
        attention, mlp = theirs.self_attn, theirs.mlp
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        assert torch.equal(ours.qkv.weight, torch.cat([part.weight for part in parts]))
        if parts[0].bias is None:
            assert ours.qkv.bias is None
        else:
            assert torch.equal(ours.qkv.bias, torch.cat([part.bias for part in parts]))
        assert torch.equal(ours.gate_up.weight, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        assert torch.equal(ours.out.weight, attention.o_proj.weight)
        assert torch.equal(ours.down.weight, mlp.down_proj.weight)
        assert torch.equal(ours.input_norm, theirs.input_layernorm.weight)
        assert torch.equal(ours.post_norm, theirs.post_attention_layernorm.weight)


def test_only_qwen3_has_norms_of_queries_and_keys() -> None:
    qwen3 = tiny_model("qwen3")

    layer = weights_of(qwen3, torch.float32, CPU).layers[1]

    assert layer.q_norm is not None
    assert layer.k_norm is not None
    assert torch.equal(layer.q_norm, qwen3.model.layers[1].self_attn.q_norm.weight)
    assert torch.equal(layer.k_norm, qwen3.model.layers[1].self_attn.k_norm.weight)
    assert weights_of(tiny_model("llama"), torch.float32, CPU).layers[1].q_norm is None


@families
def test_shape_of_the_model(family: str) -> None:
    model = tiny_model(family)

    weights = weights_of(model, torch.float32, CPU)

    head_dim = 32 if family == "qwen3" else 16
    assert (weights.family, weights.heads, weights.kv_heads, weights.head_dim) == (family, 4, 2, head_dim)
    assert (weights.max_positions, weights.vocabulary) == (512, 128)
    assert weights.norm_eps == model.config.rms_norm_eps
    assert weights.inverse_frequencies.shape == (head_dim // 2,)
    assert torch.equal(weights.embedding, model.model.embed_tokens.weight)
    assert torch.equal(weights.head, model.lm_head.weight)
    assert torch.equal(weights.norm, model.model.norm.weight)


def test_biases_of_a_llama_are_kept() -> None:
    model = tiny_model("llama", attention_bias=True, mlp_bias=True)

    layer = weights_of(model, torch.float32, CPU).layers[0]

    mlp = model.model.layers[0].mlp
    assert torch.equal(layer.out.bias, model.model.layers[0].self_attn.o_proj.bias)
    assert torch.equal(layer.gate_up.bias, torch.cat([mlp.gate_proj.bias, mlp.up_proj.bias]))
    assert torch.equal(layer.down.bias, mlp.down_proj.bias)


def test_a_tied_head_is_the_embedding_itself() -> None:
    weights = weights_of(tiny_model("llama", tie_word_embeddings=True), torch.bfloat16, CPU)

    assert weights.head is weights.embedding


def test_the_source_model_stays_whole() -> None:
    model = tiny_model("llama")
    prompt = torch.arange(20)[None]
    before = model(prompt).logits

    weights_of(model, torch.float32, CPU)

    assert torch.equal(model(prompt).logits, before)


@families
def test_a_saved_model_loads_as_it_was(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, tie_word_embeddings=family == "qwen2")

    loaded = load_weights(saved(model, tmp_path), torch.float32, CPU)

    expected = tensors(weights_of(model, torch.float32, CPU))
    assert len(tensors(loaded)) == len(expected) > 20
    assert all(torch.equal(left, right) for left, right in zip(tensors(loaded), expected, strict=True))
    assert loaded.family == family


def test_shards_load_as_one_file_does(tmp_path: Path) -> None:
    model = tiny_model("llama")
    files = saved(model, tmp_path, max_shard_size="100KB")

    loaded = load_weights(files, torch.float32, CPU)

    assert len(files.weight_files) > 2
    expected = tensors(weights_of(model, torch.float32, CPU))
    assert all(torch.equal(left, right) for left, right in zip(tensors(loaded), expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_everything_but_the_frequencies_has_the_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    loaded = load_weights(saved(tiny_model("qwen3"), tmp_path), dtype, CPU)

    assert loaded.inverse_frequencies.dtype == torch.float32
    assert {tensor.dtype for tensor in tensors(loaded) if tensor is not loaded.inverse_frequencies} == {dtype}
    assert not any(tensor.requires_grad for tensor in tensors(loaded))


def test_layers_are_freed_while_they_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_weights: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    convert, read = weights_module._layer, weights_module._hf_model

    def watched_read(*arguments: Any) -> Any:
        model = read(*arguments)
        gate_weights.extend(weakref.ref(layer.mlp.gate_proj.weight) for layer in model.model.layers)
        return model

    def watched_convert(*arguments: Any) -> LayerWeights:
        gc.collect()
        alive.append(sum(reference() is not None for reference in gate_weights))
        return convert(*arguments)

    monkeypatch.setattr(weights_module, "_hf_model", watched_read)
    monkeypatch.setattr(weights_module, "_layer", watched_convert)
    load_weights(saved(tiny_model("llama", num_hidden_layers=6), tmp_path), torch.float32, CPU)

    assert alive[0] == 6
    assert alive[-1] <= 2


def test_everything_that_ends_an_answer_is_collected(tmp_path: Path) -> None:
    model = tiny_model("llama", eos_token_id=7)
    model.generation_config.eos_token_id = [8, 9]

    loaded = load_weights(saved(model, tmp_path), torch.float32, CPU, end_ids=[10])

    assert loaded.end_ids == {7, 8, 9, 10}
    assert weights_of(model, torch.float32, CPU).end_ids == {7, 8, 9}
    assert weights_of(tiny_model("llama"), torch.float32, CPU).end_ids == frozenset()


def test_loading_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = saved(tiny_model("mistral"), tmp_path)
    capfd.readouterr()

    load_weights(files, torch.float32, CPU)

    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, r"activation 'gelu'"),
        ("mistral", {"sliding_window": 64}, r"sliding-window attention \(64 of 512 positions\)"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            r"sliding-window attention \(64 of 512 positions\)",
        ),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised by 'gptq'"),
    ],
)
def test_settings_that_are_not_computed_are_refused(family: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_supported(tiny_config(family, **settings))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("mistral", {"sliding_window": 512}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}),
    ],
)
def test_a_window_that_cuts_nothing_off_is_accepted(family: str, settings: dict[str, Any]) -> None:
    check_supported(tiny_config(family, **settings))


def test_another_family_is_refused_by_name(tmp_path: Path) -> None:
    files = saved(tiny_model("llama"), tmp_path)
    config = tmp_path / "config.json"

    for model_type in ("gpt2", "not-in-transformers"):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": model_type}))
        with pytest.raises(UsageError, match=rf"'{model_type}'.*llama, mistral, qwen2, qwen3"):
            load_weights(files, torch.float32, CPU)


def test_parameters_that_no_layer_reads_are_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[2].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))

    with pytest.raises(UsageError, match=r"self_attn\.sinks"):
        weights_of(model, torch.float32, CPU)


def test_packed_weights_are_refused() -> None:
    model = tiny_model("llama")
    packed = torch.zeros(64, 8, dtype=torch.uint8)
    model.model.layers[0].self_attn.o_proj.weight = torch.nn.Parameter(packed, requires_grad=False)

    with pytest.raises(UsageError, match=r"packed weights \(self_attn\.o_proj\.weight\)"):
        weights_of(model, torch.float32, CPU)


def changed_file(folder: Path, change: Any) -> None:
    contents = load_file(folder / "model.safetensors")
    change(contents)
    save_file(contents, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_tensor_is_an_error_and_not_random_numbers(tmp_path: Path) -> None:
    files = saved(tiny_model("llama"), tmp_path)
    changed_file(tmp_path, lambda contents: contents.pop("model.layers.1.mlp.up_proj.weight"))

    with pytest.raises(EngineError, match=r"model\.layers\.1\.mlp\.up_proj\.weight \(of 1 in all\)"):
        load_weights(files, torch.float32, CPU)


def test_a_tensor_that_transformers_passes_over_is_refused(tmp_path: Path) -> None:
    files = saved(tiny_model("llama"), tmp_path)
    changed_file(tmp_path, lambda contents: contents.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))

    with pytest.raises(UsageError, match=r"self_attn\.q_proj\.bias are not supported in a llama"):
        load_weights(files, torch.float32, CPU)


def test_a_tensor_of_another_shape_is_an_error(tmp_path: Path) -> None:
    files = saved(tiny_model("llama"), tmp_path)
    changed_file(tmp_path, lambda contents: contents.update({"model.norm.weight": torch.ones(65)}))

    with pytest.raises(EngineError, match="cannot be loaded") as caught:
        load_weights(files, torch.float32, CPU)
    assert "\n" not in str(caught.value)


def test_a_cut_file_is_one_clear_error(tmp_path: Path) -> None:
    files = saved(tiny_model("llama"), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])

    with pytest.raises(EngineError, match="cannot be loaded") as caught:
        load_weights(files, torch.float32, CPU)
    assert "\n" not in str(caught.value)


def test_the_digest_covers_names_and_content(tmp_path: Path) -> None:
    one, same, other = (tiny_model("llama", seed=seed) for seed in (0, 0, 1))
    digests = [
        weight_digest(saved(model, tmp_path / folder)) for model, folder in ((one, "a"), (same, "b"), (other, "c"))
    ]
    sharded = saved(one, tmp_path / "sharded", max_shard_size="100KB")
    before = weight_digest(sharded)
    first, second = sharded.weight_files[:2]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)

    assert digests[0] == digests[1] != digests[2]
    assert weight_digest(sharded) != before
    assert len(before) == 64


def test_the_digest_tells_file_names_apart(tmp_path: Path) -> None:
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(b"the same")

    one, two = (weight_digest(ModelFiles("tiny", tmp_path, name)) for name in ("one.gguf", "two.gguf"))

    assert one != two


def test_files_beside_the_weights_do_not_count(tmp_path: Path) -> None:
    files = saved(tiny_model("llama"), tmp_path)
    before = weight_digest(files)

    (tmp_path / "consolidated.safetensors").write_bytes(b"another format of the same weights")

    assert weight_digest(files) == before


@pytest.mark.model
def test_smollm2_loads() -> None:
    files = resolve_model("smollm2-135m")

    loaded = load_weights(files, torch.float32, CPU)

    assert (loaded.family, loaded.heads, loaded.kv_heads, loaded.head_dim) == ("llama", 9, 3, 64)
    assert (len(loaded.layers), loaded.vocabulary, loaded.max_positions) == (30, 49152, 8192)
    assert loaded.head is loaded.embedding
    assert loaded.end_ids == {2}
