"""A fake engine with faults that can be planted, so that an audit's verdict can be held against the truth.

It has a small chunk cache with real hits, evictions and a ledger; policies choose from it as from any other. Answers
are a hash of the prompt, and, with a fault, of the very thing that the fault lets in. A call that an audit has no
reason to make raises.

Options (`--option NAME=VALUE`): `fault` (below), `only-policy` (the fault acts under this policy alone), `at` (the
request id at which `crash` strikes), `delay-ms` (time that a serve takes), `context` (the longest prompt and answer),
`figures=none` (report neither times nor what is in the cache, as a bare server would).
"""

from kvaudit.engines.scripted.engine import FAULTS, ScriptedEngine, open_engine
from kvaudit.engines.scripted.tokenizer import ByteTokenizer

__all__ = ["FAULTS", "ByteTokenizer", "ScriptedEngine", "open_engine"]
