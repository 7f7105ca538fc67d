"""An audit from outside: whatever answers behind an OpenAI-compatible URL, with the cache that it has.

options.py    what the user asks for        asking.py     a prompt as the body of a request
sending.py    one request, its answer       retrying.py   the same until it is answered, within a limit
claims.py     what an answer must be        metrics.py    the server's own counters
counters.py   tokens that came from a cache identity.py   which server it is, and whether it was restarted
resetting.py  how its cache is emptied      probing.py    whether it is empty, and what the server can tell
opening.py    what holds for a whole run    engine.py     the engine
target.py     one server that is asked      jsons.py      JSON, which may be none
endings.py    whether an answer is whole    flows.py      whether it tells anything, and ends
keys.py       what is taken out of texts    saying.py     what a server says in place of an answer
refusals.py   what a reset's answer says    presets.py    how known servers are reset
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvaudit.engines import EngineSettings

if TYPE_CHECKING:
    from kvaudit.engines.server.engine import ServerEngine


def open_engine(settings: EngineSettings) -> ServerEngine:
    """Raises UsageError for options that cannot be, EngineError for a server that cannot be audited."""
    from kvaudit.engines.server.opening import opened

    return opened(settings)
