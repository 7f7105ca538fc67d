"""The digest of what a GGUF file holds before its tensors: exact, and of no file that is none."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvaudit.models.gguf_file import gguf_metadata_digest


def written(path: Path, tokens: list[str], tensor: float = 1.0) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("k.uint8", 1)
    writer.add_int8("k.int8", -1)
    writer.add_uint16("k.uint16", 1)
    writer.add_int16("k.int16", -1)
    writer.add_uint32("k.uint32", 1)
    writer.add_int32("k.int32", -1)
    writer.add_float32("k.float32", 1.0)
    writer.add_uint64("k.uint64", 1)
    writer.add_int64("k.int64", -1)
    writer.add_float64("k.float64", 1.0)
    writer.add_bool("k.bool", True)
    writer.add_string("k.string", "text")
    writer.add_array("k.scores", [0.5, 1.5, 2.5])
    writer.add_array("k.nested", [["a", "bc"], ["d"]])
    writer.add_array("k.tokens", tokens)
    writer.add_tensor("token_embd.weight", np.full((2, 32), tensor, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_covers_everything_up_to_the_first_tensor(tmp_path: Path) -> None:
    content = written(tmp_path / "a.gguf", ["x", "yé"]).read_bytes()
    name = b"token_embd.weight"
    end = content.index(len(name).to_bytes(8, "little") + name)

    assert gguf_metadata_digest(tmp_path / "a.gguf") == sha256(content[:end]).hexdigest()


def test_other_tensors_are_the_same_and_another_token_is_not(tmp_path: Path) -> None:
    digests = [
        gguf_metadata_digest(written(tmp_path / name, tokens, tensor))
        for name, tokens, tensor in (("a", ["x"], 1.0), ("b", ["x"], 2.0), ("c", ["y"], 1.0))
    ]

    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(4), b"PK\x03\x04" + bytes(40)])
def test_what_is_no_such_file_has_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)

    assert gguf_metadata_digest(tmp_path / "a") is None


def test_a_file_that_is_gone_has_none(tmp_path: Path) -> None:
    assert gguf_metadata_digest(tmp_path / "gone") is None


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(4, 700), st.binary(min_size=1, max_size=12), st.integers(0, 900))
def test_damage_never_crashes_it(tmp_path: Path, at: int, change: bytes, length: int) -> None:
    if not (tmp_path / "whole").exists():
        written(tmp_path / "whole", ["x", "y"])
    content = bytearray((tmp_path / "whole").read_bytes())
    content[at : at + len(change)] = change
    (tmp_path / "damaged").write_bytes(content[:length] or b"G")

    digest = gguf_metadata_digest(tmp_path / "damaged")
    assert digest is None or len(digest) == 64
