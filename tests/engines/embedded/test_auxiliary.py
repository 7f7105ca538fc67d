"""The auxiliary model: its attention against transformers' own, moved to another tokenizer's tokens by hand, its
limits, and that it is opened once, when it is asked for, and not on a request's time."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blend_cases import weights_for
from byte_tokenizers import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILY_SETTINGS, TinyTokenizer, tiny_model

from kvaudit.engines import PRESETS, EngineSettings
from kvaudit.engines.embedded import auxiliary as module
from kvaudit.engines.embedded import engine as engine_module
from kvaudit.engines.embedded import open_engine
from kvaudit.engines.embedded.auxiliary import Auxiliary, Shares, SmallModel, characters, last_layer_attention
from kvaudit.engines.embedded.engine import EmbeddedEngine
from kvaudit.engines.embedded.forward import ROWS_PER_BLOCK, Transformer
from kvaudit.engines.embedded.weights import weights_of
from kvaudit.errors import EngineError, UsageError
from kvaudit.models import files as models
from kvaudit.models.fetch import KNOWN_MODELS
from kvaudit.models.tokenizer import ModelTokenizer
from kvaudit.plugins import load
from kvaudit.records import Prompt, PromptSegment, Sampling

CPU = torch.device("cpu")


def prompt_of(text: str) -> Prompt:
    """An instruction, three documents and a query of ASCII text, a character a token; spaces end segments."""
    ids, segments = [], []
    words = text.split(" ")
    for index, word in enumerate(words):
        kind = "instruction" if index == 0 else "query" if index == len(words) - 1 else "document"
        segments.append(PromptSegment(kind, word, len(ids), len(ids) + len(word)))
        ids += word.encode()
    return Prompt(tuple(ids), tuple(segments))


TEXT = "abc defghi jk lmnopq rst"
PROMPT = prompt_of(TEXT)
PAIRS = ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st"]


@dataclass(frozen=True)
class PairTokenizer:
    """Two characters a token."""

    leading_ids: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.sha256(b"pairs").hexdigest()

    def encode(self, text: str) -> list[int]:
        return [PAIRS.index(text[at : at + 2]) for at in range(0, len(text), 2)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(PAIRS[token_id] for token_id in token_ids)


def small_model(tokenizer: object, family: str = "llama") -> SmallModel:
    return SmallModel("small", "1" * 64, Transformer(weights_for(family, 5)), tokenizer)  # type: ignore[arg-type]


def auxiliary_of(model: SmallModel) -> Auxiliary:
    return Auxiliary("small", TinyTokenizer(), torch.float32, CPU, model)


def transformers_attention(family: str, ids: Sequence[int]) -> torch.Tensor:
    """[H, n, n] of the last layer."""
    model = tiny_model(family, 5)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(torch.tensor([list(ids)]), output_attentions=True).attentions[-1][0]


@pytest.mark.parametrize("family", FAMILY_SETTINGS)
def test_the_attention_is_transformers_own(family: str) -> None:
    got = auxiliary_of(small_model(TinyTokenizer(), family)).attention(PROMPT, 15, 20)
    expected = transformers_attention(family, PROMPT.token_ids)[:, 15:20].mean(1)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.sum(1), 1, rtol=1e-5)


def test_many_rows_are_taken_in_blocks() -> None:
    ids = np.random.default_rng(1).integers(0, 128, 2 * ROWS_PER_BLOCK + 30).tolist()
    rows = np.ones(len(ids))
    got = last_layer_attention(Transformer(weights_for("llama", 5)), ids, rows)
    np.testing.assert_allclose(got, transformers_attention("llama", ids).mean(1), rtol=1e-4, atol=1e-5)


class Decoding:
    """Tokens with a text each; `together` gives the text of runs of tokens that make one character."""

    def __init__(self, texts: Sequence[str], together: dict[tuple[int, ...], str] | None = None, strips: bool = False):
        self.texts, self.together, self.strips = texts, together or {}, strips

    def decode(self, token_ids: Sequence[int]) -> str:
        ids, text = list(token_ids), ""
        while ids:
            run = next((r for r in self.together if tuple(ids[: len(r)]) == r), None)
            text += self.together[run] if run else self.texts[ids[0]]
            ids = ids[len(run) if run else 1 :]
        return text.removeprefix(" ") if self.strips else text


@pytest.mark.parametrize(
    ("decoder", "ids", "text", "borders"),
    [
        (Decoding(["ab", "c", " d"]), [0, 1, 2, 0], "abc dab", [0, 2, 3, 5, 7]),
        (Decoding(["ab", "\ufffd", "\ufffd"], {(1, 2): "é"}), [0, 1, 2, 0], "abéab", [0, 2, 2.5, 3, 5]),
        (Decoding(["ab", "\ufffd"]), [0, 1], "ab\ufffd", [0, 2, 3]),
        (Decoding(["ab", "\ufffd"]), [1, 0], "\ufffdab", [0, 1.5, 3]),
        (Decoding([" the", " cat", ""], strips=True), [0, 1, 0, 2], "the cat the", [0, 3, 7, 11, 11]),
        (Decoding(["ab"]), [], "", [0]),
    ],
    ids=["plain", "a character of two tokens", "cut off", "half a character", "a space that is dropped", "none"],
)
def test_where_tokens_begin_and_end(decoder: Decoding, ids: list[int], text: str, borders: list[float]) -> None:
    got_text, got = characters(decoder, ids)
    assert got_text == text
    assert len(got) == len(ids) + 1
    np.testing.assert_allclose(got, borders)


BYTES = ModelTokenizer(byte_tokenizer(merges=2))


@given(
    st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd") | st.sampled_from("than"), max_size=12
    )
)
def test_a_byte_level_tokenizers_tokens_tile_any_text(text: str) -> None:
    """A token is a byte, so that the tokens of a character share it in equal parts."""
    ids = BYTES.encode(text)
    got_text, got = characters(BYTES, ids)
    assert got_text == text
    assert (got[0], got[-1]) == (0, len(text))
    assert (np.diff(got) > 0).all()
    assert {float(border) for border in range(len(text) + 1)} - set(got.tolist()) == _inside_merges(text)


def _inside_merges(text: str) -> set[float]:
    return {float(at + 1) for at in range(len(text) - 1) if text[at : at + 2] in ("th", "an")}


def test_shares_by_hand() -> None:
    """Theirs: [0, 2) [2, 3) [3, 5); ours: [0, 1) [1, 4) [4, 5)."""
    shares = Shares.of(np.array([0.0, 2, 3, 5]), np.array([0.0, 1, 4, 5]))
    moved = shares.moved(np.array([[4, 1, 2], [0, 0, 8]], dtype=np.float32))
    np.testing.assert_allclose(moved, [[2, 2 + 1 + 1, 1], [0, 4, 4]])
    np.testing.assert_allclose(shares.back(1, 2), [0.5, 1, 0.5])
    np.testing.assert_allclose(shares.back(0, 3), [1, 1, 1])


borders = st.lists(st.integers(0, 12), max_size=6).map(lambda cuts: np.array([0.0, *sorted(cuts), 12]))


@given(borders, borders)
def test_no_attention_is_lost_between_two_tilings(theirs: np.ndarray, ours: np.ndarray) -> None:
    """Tokens without a text have no share: what they are looked at is lost, and they get none."""
    shares = Shares.of(theirs, ours)
    attention = np.arange(1, len(theirs), dtype=np.float32)[None]
    moved = shares.moved(attention)
    assert moved.shape == (1, len(ours) - 1)
    np.testing.assert_allclose(moved.sum(), attention[0, np.diff(theirs) > 0].sum(), rtol=1e-5)
    assert (moved[0, np.diff(ours) == 0] == 0).all()
    np.testing.assert_allclose(shares.back(0, len(ours) - 1), np.diff(theirs) > 0)


@pytest.mark.parametrize("leading", [(), (7,)])
def test_another_tokenizers_attention_goes_to_the_tokens_that_share_its_text(leading: tuple[int, ...]) -> None:
    tokenizer = PairTokenizer(leading)
    ids = [*leading, *tokenizer.encode("".join(TEXT.split(" ")))]
    got = auxiliary_of(small_model(tokenizer)).attention(PROMPT, 15, 20)
    attention, first = transformers_attention("llama", ids).numpy(), len(leading)
    weights = np.zeros(len(ids))  # pairs (14, 15), (16, 17), (18, 19): half of the first is asked for
    weights[first + 7 : first + 10] = 0.5, 1, 1
    mean = (attention * weights[None, :, None]).sum(1) / weights.sum()
    np.testing.assert_allclose(got, np.repeat(mean[:, first:] / 2, 2, axis=1), rtol=1e-4, atol=1e-5)


def test_a_prompt_longer_than_the_auxiliary_models_positions_is_refused() -> None:
    prompt = prompt_of("a" * 600 + " b")
    with pytest.raises(EngineError, match="601 tokens is longer than the 512 positions of auxiliary model 'small'"):
        auxiliary_of(small_model(TinyTokenizer())).attention(prompt, 600, 601)


def test_a_tokenizer_that_changes_the_text_is_refused() -> None:
    class Loud(PairTokenizer):
        def decode(self, token_ids: Sequence[int]) -> str:
            return super().decode(token_ids).upper()

    with pytest.raises(EngineError, match="the tokenizer of auxiliary model 'small' changes the text"):
        auxiliary_of(small_model(Loud())).attention(PROMPT, 15, 20)


@dataclass
class Openings:
    """What was opened, and how often the engine had looked at the clock by then; refuses any other name."""

    seen: list[str] = field(default_factory=list)
    looks: int = 0
    looks_when_opened: list[int] = field(default_factory=list)

    def __call__(
        self, name: str, dtype: torch.dtype, device: torch.device, standing: SmallModel | None = None
    ) -> SmallModel:
        assert (name, dtype, device, standing) == ("other", torch.float32, CPU, None)
        self.seen.append(name)
        self.looks_when_opened.append(self.looks)
        return small_model(TinyTokenizer())

    def clock(self) -> float:
        self.looks += 1
        return float(self.looks)


def test_it_is_opened_once_when_a_policy_asks_and_before_the_request_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    openings = Openings()
    monkeypatch.setattr(module, "open_model", openings)
    monkeypatch.setattr(engine_module, "perf_counter", openings.clock)
    auxiliary = Auxiliary("other", TinyTokenizer(), torch.float32, CPU)
    settings = EngineSettings(recompute_ratio=0.3, switches=PRESETS["ideal"], device="cpu")
    engine = EmbeddedEngine(weights_for("llama"), TinyTokenizer(), settings, {}, auxiliary)
    sampling = Sampling(1)
    engine.serve("r0", "request", PROMPT, sampling, load("policies", "token-topk")())
    assert openings.seen == []
    assert engine.describe()["auxiliary_model"] == "other"
    assert "auxiliary_weights_sha256" not in engine.describe()
    looks = openings.looks
    for number in (1, 2):
        served = engine.serve(f"r{number}", "request", PROMPT, sampling, load("policies", "cacheclip")())
        assert served.recomputed_tokens == served.budget_k > 0
    assert openings.seen == ["other"]
    assert openings.looks_when_opened == [looks], "the request's time had not begun"
    assert engine.describe()["auxiliary_weights_sha256"] == "1" * 64


def saved(folder: Path, seed: int) -> str:
    tiny_model("llama", seed, vocab_size=300).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def test_an_engine_opens_with_its_own_model_or_another_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, other = saved(tmp_path / "main", 1), saved(tmp_path / "other", 2)
    opened = {
        name: open_engine(EngineSettings(model=main, device="cpu", options={"auxiliary": model}))
        for name, model in (("own", main), ("beside", other))
    }
    told = {name: engine.describe() for name, engine in opened.items()}
    assert told["own"]["auxiliary_weights_sha256"] == told["own"]["weights_sha256"]
    own: Any = opened["own"]
    assert own._auxiliary.open().transformer.weights is own.transformer.weights
    assert told["beside"]["auxiliary_model"] == other
    assert told["beside"]["auxiliary_weights_sha256"] not in (None, told["beside"]["weights_sha256"])
    weights = weights_of(tiny_model("llama", 2, vocab_size=300), torch.float32, CPU)
    rows = np.zeros(len(PROMPT.token_ids))
    rows[15:20] = 1
    expected = last_layer_attention(Transformer(weights), PROMPT.token_ids, rows)
    auxiliary = opened["beside"]._auxiliary  # type: ignore[attr-defined]
    np.testing.assert_allclose(auxiliary.attention(PROMPT, 15, 20), expected, rtol=1e-4, atol=1e-6)
    assert auxiliary.describe()["auxiliary_weights_sha256"] == told["beside"]["auxiliary_weights_sha256"]


def asked(engine: Any) -> SmallModel:
    """What the engine's auxiliary model is once a policy has asked for it."""
    model: SmallModel = engine._auxiliary.open()
    return model


def test_the_cells_of_a_study_load_it_once(tmp_path: Path) -> None:
    """Each engine is opened while the one before it is held, and describes itself before a policy asks."""
    main, other = saved(tmp_path / "main", 1), saved(tmp_path / "other", 2)
    settings = EngineSettings(model=main, device="cpu", options={"auxiliary": other})
    engine: Any = open_engine(settings)
    told, weights = engine.describe(), asked(engine).transformer.weights
    for _ in range(2):
        engine = open_engine(settings)
        assert engine.describe() == told
        assert asked(engine).transformer.weights is weights
    kept = asked(open_engine(EngineSettings(model=main, device="cpu", dtype="bfloat16", options={"auxiliary": other})))
    assert kept.transformer.weights.embedding.dtype == torch.bfloat16


def test_an_auxiliary_model_that_changed_meanwhile_is_loaded_anew(tmp_path: Path) -> None:
    main, other = saved(tmp_path / "main", 1), saved(tmp_path / "other", 2)
    settings = EngineSettings(model=main, device="cpu", options={"auxiliary": other})
    first = open_engine(settings)
    before = asked(first)
    saved(tmp_path / "other", 3)
    second = open_engine(settings)
    assert asked(second).digest != before.digest
    assert asked(second).transformer.weights is not before.transformer.weights


def test_nobody_holds_it_when_no_engine_does(tmp_path: Path) -> None:
    main, other = saved(tmp_path / "main", 1), saved(tmp_path / "other", 2)
    engine = open_engine(EngineSettings(model=main, device="cpu", options={"auxiliary": other}))
    asked(engine)
    gone = weakref.ref(asked(engine))
    del engine
    gc.collect()
    assert gone() is None


def test_the_default_auxiliary_models_pinned_file_stands_in_the_manifest_without_a_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_fetch(model: object) -> Path:
        raise AssertionError("nothing asked for the model yet")

    monkeypatch.setattr(models, "fetched", no_fetch)
    engine = open_engine(EngineSettings(model=saved(tmp_path / "main", 1), device="cpu"))
    told = engine.describe()
    assert told["auxiliary_model"] == "smollm2-135m"
    assert told["auxiliary_file_sha256"] == KNOWN_MODELS["smollm2-135m"].sha256
    assert "auxiliary_weights_sha256" not in told


def test_a_model_that_kvaudit_does_not_fetch_has_no_pinned_file(tmp_path: Path) -> None:
    main = saved(tmp_path / "main", 1)
    told = open_engine(EngineSettings(model=main, device="cpu", options={"auxiliary": main})).describe()
    assert "auxiliary_file_sha256" not in told


def test_an_auxiliary_model_that_is_not_there_is_refused_when_the_engine_opens(tmp_path: Path) -> None:
    main = saved(tmp_path / "main", 1)
    with pytest.raises(UsageError, match="unknown model 'nowhere'"):
        open_engine(EngineSettings(model=main, device="cpu", options={"auxiliary": "nowhere"}))
