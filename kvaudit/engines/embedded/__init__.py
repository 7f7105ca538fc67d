"""The embedded engine: kvaudit's own selective recomputation in torch (DESIGN 5).

weights.py    files -> fused weights               cache.py      chunk entries, LRU, the ledger
rotary.py     rotary variants                      versions.py   which version of a chunk suits a context
auxiliary.py  a small model's attention            prefix.py     exact prefix caches
forward.py    blocks over an arena of KV           lookup.py     which entries a prompt may use, and stores
decode.py     greedy decoding, checks              mixed.py      a prompt's cache: loaded, zeroed, computed
engine.py     one prompt at a time                 blend.py      selective recomputation
                                                   selecting.py  a policy's budget, schedule and choices
                                                   signals.py    what policies may ask for
                                                   writing.py    what is stored, and with which attention
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvaudit.engines import Engine, EngineSettings, Tokenizer, check_switches
from kvaudit.errors import UsageError

if TYPE_CHECKING:
    import torch

    from kvaudit.engines.embedded.engine import EmbeddedEngine
    from kvaudit.engines.embedded.weights import Weights
    from kvaudit.models.files import ModelFiles

    Place = tuple[ModelFiles, str, torch.dtype, torch.device]

DTYPES = ("float32", "bfloat16", "float16")
OPTIONS = ("auxiliary",)

_standing: WeakValueDictionary[Place, EmbeddedEngine] = WeakValueDictionary()
"""By model files, their digest, dtype and device the engine that was opened last, as long as somebody holds it."""


def open_engine(settings: EngineSettings) -> Engine:
    """Resolve the model, load it and open an engine over it. Raises UsageError for what cannot be had or computed.

    The option `auxiliary` names a second model (default: smollm2-135m), which is opened when a policy first needs its
    attention. Where it is the engine's own, or that of an engine which is still held, its weights are not loaded twice.

    An engine that is opened while somebody holds another over the same weights shares them, and nothing else. Who needs
    them loaded anew, as the second full prefill does, lets go of the first engine before.
    """
    import torch

    from kvaudit.engines.embedded.auxiliary import DEFAULT_MODEL, Auxiliary, SmallModel
    from kvaudit.engines.embedded.engine import EmbeddedEngine
    from kvaudit.engines.embedded.forward import Transformer
    from kvaudit.models.files import resolve_model, weight_digest

    if settings.dtype not in DTYPES:
        raise UsageError(f"unknown dtype {settings.dtype!r}", f"known: {', '.join(DTYPES)}")
    unknown = [name for name in settings.options if name not in OPTIONS]
    if unknown:
        raise UsageError(f"engine 'embedded' has no option {unknown[0]!r}", f"known: {', '.join(OPTIONS)}")
    check_switches(settings.switches)
    dtype, device = getattr(torch, settings.dtype), _device(settings.device)
    beside = settings.options.get("auxiliary", DEFAULT_MODEL)
    files = resolve_model(settings.model)
    known = weight_digest(resolve_model(beside)) if "auxiliary" in settings.options else None
    digest = weight_digest(files)
    place = (files, digest, dtype, device)
    tokenizer, weights = _loaded(place)
    own = SmallModel(files.name, digest, Transformer(weights), tokenizer) if beside == settings.model else None
    auxiliary = Auxiliary(beside, tokenizer, dtype, device, own, known)
    identity = {"model": files.name, "weights_sha256": digest}
    engine = EmbeddedEngine(weights, tokenizer, settings, identity, auxiliary)
    _standing[place] = engine
    return engine


def _loaded(place: Place) -> tuple[Tokenizer, Weights]:
    """Tokenizer and weights, which nobody changes: those of an engine that stands over them, else out of the files."""
    from kvaudit.engines.embedded.weights import load_weights
    from kvaudit.models.gguf_file import parsed_once
    from kvaudit.models.tokenizer import load_tokenizer

    standing = _standing.get(place)
    if standing is not None:
        return standing.tokenizer, standing.transformer.weights
    files, _, dtype, device = place
    with parsed_once():
        tokenizer = load_tokenizer(files)
        return tokenizer, load_weights(files, dtype, device, tokenizer.end_ids)


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
