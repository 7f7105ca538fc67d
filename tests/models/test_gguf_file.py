from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from kvaudit.engines.embedded.weights import load_weights, weights_of
from kvaudit.errors import EngineError, UsageError
from kvaudit.models.files import resolve_model
from kvaudit.models.gguf_file import check_gguf, gguf_leading_ids, parsed_once

CPU = torch.device("cpu")
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp keeps them: the two halves of each head row by row."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    model: Any,
    architecture: str = "llama",
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    extra_settings: Mapping[str, bool | int | str] | None = None,
) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    for key, value in (extra_settings or {}).items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}[type(value)]
        add(key, value)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    writer.add_tensor("output.weight", state["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        for theirs, ours in LAYER_NAMES.items():
            rows = state[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if ours == "attn_q" else config.num_key_value_heads
                rows = interleaved(rows, heads)
            writer.add_tensor(f"blk.{layer}.{ours}.weight", np.ascontiguousarray(rows))
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_gives_the_weights_that_went_in(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("llama")
    path = write_gguf(tmp_path / "tiny.gguf", model)
    capfd.readouterr()

    loaded = load_weights(resolve_model(str(path)), torch.float32, CPU)

    expected = weights_of(model, torch.float32, CPU)
    assert capfd.readouterr() == ("", "")
    for ours, theirs in zip(loaded.layers, expected.layers, strict=True):
        assert torch.equal(ours.qkv.weight, theirs.qkv.weight)
        assert torch.equal(ours.gate_up.weight, theirs.gate_up.weight)
        assert torch.equal(ours.down.weight, theirs.down.weight)
        assert torch.equal(ours.out.weight, theirs.out.weight)
        assert torch.equal(ours.post_norm, theirs.post_norm)
    assert torch.equal(loaded.embedding, expected.embedding)
    assert torch.equal(loaded.head, expected.head)
    assert torch.equal(loaded.inverse_frequencies, expected.inverse_frequencies)
    assert loaded.norm_eps == pytest.approx(expected.norm_eps)


def test_the_file_is_parsed_once_and_gguf_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    parsed: list[object] = []
    reader = gguf.GGUFReader

    def counted(*arguments: Any) -> gguf.GGUFReader:
        parsed.append(arguments)
        return reader(*arguments)

    monkeypatch.setattr(gguf, "GGUFReader", counted)
    load_weights(resolve_model(str(path)), torch.float32, CPU)

    assert len(parsed) == 1
    assert gguf.GGUFReader is counted
    with pytest.raises(RuntimeError), parsed_once():
        raise RuntimeError
    assert gguf.GGUFReader is counted


def test_what_ends_an_answer_is_what_the_file_says(tmp_path: Path) -> None:
    model = tiny_model("llama")
    ends = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 6}
    silent, explicit = (
        write_gguf(tmp_path / "silent.gguf", model),
        write_gguf(tmp_path / "explicit.gguf", model, extra_settings=ends),
    )

    assert load_weights(resolve_model(str(silent)), torch.float32, CPU).end_ids == frozenset()
    assert load_weights(resolve_model(str(explicit)), torch.float32, CPU, end_ids=[9]).end_ids == {5, 6, 9}


@pytest.mark.parametrize(("adds", "leading"), [(None, None), (False, ()), (True, (3,))])
def test_what_stands_before_a_text_is_what_the_file_says(
    adds: bool | None, leading: tuple[int, ...] | None, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"tokenizer.ggml.bos_token_id": 3}
    if adds is not None:
        settings["tokenizer.ggml.add_bos_token"] = adds
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), extra_settings=settings)

    assert gguf_leading_ids(path) == leading


def test_an_architecture_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), architecture="gemma2")

    with pytest.raises(UsageError, match=r"'gemma2'.*llama, qwen2, qwen3"):
        load_weights(resolve_model(str(path)), torch.float32, CPU)


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        ({"rope_freqs.weight": np.ones(8, np.float32)}, {}, r"'rope_freqs\.weight'"),
        ({"blk.0.attn_q.bias": np.ones(64, np.float32)}, {}, r"'blk\.0\.attn_q\.bias'"),
        ({}, {"llama.rope.scaling.type": "yarn"}, r"rotary scaling 'yarn'"),
        ({}, {"llama.attention.sliding_window": 64}, r"sliding-window attention \(64 positions\)"),
    ],
)
def test_what_transformers_would_pass_over_is_refused(
    tensors: dict[str, np.ndarray], settings: dict[str, int | str], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), extra_tensors=tensors, extra_settings=settings)

    with pytest.raises(UsageError, match=message):
        check_gguf(path)


def test_settings_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    settings = {"llama.rope.scaling.type": "none", "llama.attention.sliding_window": 512}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), extra_settings=settings)

    check_gguf(path)


@pytest.mark.parametrize("content", [b"", b"not a model at all, whatever its name"])
def test_a_file_that_is_no_gguf_is_one_clear_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)

    with pytest.raises(EngineError, match=r"broken\.gguf.*cannot be loaded") as caught:
        load_weights(resolve_model(str(path)), torch.float32, CPU)
    assert "\n" not in str(caught.value)


def test_a_cut_gguf_is_one_clear_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    path.write_bytes(path.read_bytes()[:-5000])

    with pytest.raises(EngineError, match="cannot be loaded") as caught:
        load_weights(resolve_model(str(path)), torch.float32, CPU)
    assert "\n" not in str(caught.value)
