"""LMCache 0.5.6: the separator that CacheBlend is told is not the one that it looks for.

1. White space around LMCACHE_BLEND_SPECIAL_STR is taken off when the environment is read.
2. SegmentTokenDatabase drops the first token of the separator, which it takes for BOS, whether the tokenizer puts one
   there or not.

A prompt made as LMCache's own example makes one is then split elsewhere or not at all, and nothing says so.

    pip install lmcache==0.5.6 transformers
    python lmcache_separator.py MODEL_FOLDER     # a model whose tokenizer puts no BOS before a text, such as Qwen3

Nothing of kvaudit is needed. Exits with 1 while LMCache behaves so, with 0 once it does not.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

SEPARATOR = " # # "
os.environ["LMCACHE_BLEND_SPECIAL_STR"] = SEPARATOR
os.environ["PYTHONHASHSEED"] = "0"


def main(model: str) -> int:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.token_database import SegmentTokenDatabase
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    alone = tokenizer.encode(SEPARATOR, add_special_tokens=False)
    config = LMCacheEngineConfig.from_env()
    wrong = config.blend_special_str != SEPARATOR
    print(f"LMCACHE_BLEND_SPECIAL_STR={SEPARATOR!r} is read as {config.blend_special_str!r}")

    config.blend_special_str = SEPARATOR
    metadata = SimpleNamespace(model_name=model, world_size=1, worker_id=0, kv_dtype=None, fmt="vllm", use_mla=False)
    database = SegmentTokenDatabase(config, metadata)
    looked_for = database.sep_tokens.tolist()
    print(f"{SEPARATOR!r} has the token ids {alone}, LMCache looks for {looked_for}")
    wrong |= looked_for != alone

    documents = [tokenizer.encode(text, add_special_tokens=False) for text in ("one two", "three four", "five six")]
    prompt = [*documents[0], *alone, *documents[1], *alone, *documents[2]]
    chunks = [prompt[start:end] for start, end, _ in database.process_tokens(prompt, make_key=False)]
    print(f"documents {documents}\nchunks    {chunks}")
    return int(wrong or chunks != documents)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
