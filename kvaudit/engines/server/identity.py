"""Which deployment it is: what a server says of itself, and where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvaudit.engines.server.jsons import object_in
from kvaudit.engines.server.sending import Connection
from kvaudit.errors import UsageError

_VERSIONS = (("/version", "version"), ("/get_server_info", "version"), ("/props", "build_info"))
"""Where vLLM, SGLang and llama.cpp tell their version; the latter two tell there which files they loaded."""
_FILES = "model_path"
_PORTS = {"http": 80, "https": 443}
_THIS_MACHINE = frozenset({"localhost", "::1"})


@dataclass(frozen=True, slots=True)
class Identity:
    """What a server says of itself that stays as long as the deployment does.

    `models`: by id, what their files are, None where its list does not say. `files`: those that it loaded, where it
    tells them elsewhere.
    """

    version: str | None
    models: Mapping[str, str | None]
    files: str | None = None

    def facts(self, model: str) -> dict[str, object]:
        """None where the server does not say; that it lists models, this one or not, is something that it says."""
        listed = model if model in self.models else "not served" if self.models else None
        return {"version": self.version, "weights": self.weights(model) or listed}

    def weights(self, model: str) -> str | None:
        """What the model's files are; None where the server does not say.

        SGLang's list has a model's own name in their place.
        """
        listed = self.models.get(model)
        may_be_loaded = model in self.models or not self.models
        return self.files if self.files and may_be_loaded and listed in (model, None) else listed


def read_identity(connection: Connection) -> Identity:
    """Raises AttemptError where the server cannot be asked."""
    status, text = connection.call("GET", f"{connection.base_url}/models")
    listed = object_in(text).get("data") if status == 200 else None
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    roots = {str(entry["id"]): entry.get("root") for entry in entries if "id" in entry}
    version, files = _told_elsewhere(connection)
    return Identity(version, {name: str(root) if root else None for name, root in roots.items()}, files)


def same_address(one: str, other: str) -> bool:
    """Whether two URLs lead to the same host, port and path."""
    return _address(one) == _address(other)


def _address(url: str) -> tuple[str | None, int | None, str]:
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname in _THIS_MACHINE else parts.hostname
    return host, parts.port or _PORTS.get(parts.scheme), parts.path.rstrip("/")


def check_model(identity: Identity, model: str) -> None:
    """Raises UsageError where the server lists its models, and this is none of them."""
    if identity.models and model not in identity.models:
        raise UsageError(f"the server does not serve {model!r}", f"it serves {', '.join(sorted(identity.models))}")


def _told_elsewhere(connection: Connection) -> tuple[str | None, str | None]:
    """The version, and the files where they stand beside it."""
    for path, name in _VERSIONS:
        found = object_in(connection.found(path) or "")
        version, files = found.get(name), found.get(_FILES)
        if isinstance(version, str):
            return version, files if isinstance(files, str) and files else None
    return None, None
