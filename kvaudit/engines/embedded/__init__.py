"""The embedded engine: kvaudit's own selective recomputation in torch (DESIGN 5).

models.py     a model's name -> its files          forward.py   blocks over an arena of keys and values
weights.py    files -> fused weights               cache.py     chunk entries, LRU, the ledger
rotary.py     rotary variants                      lookup.py    which entries a prompt may use
tokenizer.py  text <-> token ids                   blend.py     selective recomputation
engine.py     one prompt at a time                 decode.py    greedy answers, checks against full prefill
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvaudit.engines import Engine, EngineSettings
from kvaudit.errors import UsageError

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")


def open_engine(settings: EngineSettings) -> Engine:
    """Resolve the model, load it and open an engine over it. Raises UsageError for what cannot be had or computed."""
    import torch

    from kvaudit.engines.embedded.engine import EmbeddedEngine
    from kvaudit.engines.embedded.gguf_file import parsed_once
    from kvaudit.engines.embedded.models import resolve_model
    from kvaudit.engines.embedded.tokenizer import load_tokenizer
    from kvaudit.engines.embedded.weights import load_weights, weight_digest

    if settings.dtype not in DTYPES:
        raise UsageError(f"unknown dtype {settings.dtype!r}", f"known: {', '.join(DTYPES)}")
    if settings.options:
        raise UsageError(f"engine 'embedded' has no option {next(iter(settings.options))!r}", "leave --option out")
    device = _device(settings.device)
    files = resolve_model(settings.model)
    with parsed_once():
        tokenizer = load_tokenizer(files)
        weights = load_weights(files, getattr(torch, settings.dtype), device, tokenizer.end_ids)
    identity = {"model": files.name, "weights_sha256": weight_digest(files)}
    return EmbeddedEngine(weights, tokenizer, settings, identity)


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"unknown device {name!r}", "use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} is not supported", "use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {name!r} was asked for, but torch sees no CUDA device", "use --device cpu")
    return device
