"""How fast and in how much memory `--segment auto` finds what recurs, on one core.

    python tests/bench/segmenting.py [--requests 500] [--model smollm2-135m]

Requests with five of 300 documents in random order, each text once: 500 requests are 1.5 million tokens, all of which
have to be tokenised. Says the time in all and without the tokenizer, how far the process's memory rose, and how many of
the documents that stand in two requests or more came out as one segment each.
"""

from __future__ import annotations

import argparse
import os
import resource
from collections.abc import Sequence
from random import Random
from time import process_time

os.environ["RAYON_NUM_THREADS"] = "1"

from kvaudit.models.reading import open_tokenizer
from kvaudit.models.tokenizer import ModelTokenizer
from kvaudit.records import Request
from kvaudit.segmenting.applying import segment_requests
from kvaudit.segmenting.strategies import parse_strategies
from kvaudit.traces.segments import make_segment

DRAWN = Random(0)
WORDS = ["".join(DRAWN.choices("abcdefghijklmnopqrstuvwxyz", k=DRAWN.randint(2, 8))) for _ in range(3000)]


def sentence() -> str:
    return " ".join(DRAWN.choices(WORDS, k=DRAWN.randint(6, 14))).capitalize() + "."


DOCUMENTS = [" ".join(sentence() for _ in range(DRAWN.randint(5, 29))) for _ in range(300)]


def request(number: int, found: Sequence[str]) -> Request:
    documents = "\n\n".join(f"[{at}] {text}" for at, text in enumerate(found, start=1))
    text = f"Answer from the documents.\n\n{documents}\n\nQuestion {number}: {sentence()}"
    return Request(f"r{number}", number, (make_segment("query", text, "user"),), chat=True)


class Timed:
    """A tokenizer that knows how long it took."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self.seconds = 0.0

    def offsets(self, text: str) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
        started = process_time()
        found = self._tokenizer.offsets(text)
        self.seconds += process_time() - started
        return found


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--model", default="smollm2-135m")
    chosen = parser.parse_args()
    tokenizer = Timed(open_tokenizer(chosen.model).tokenizer)
    served = [DRAWN.sample(DOCUMENTS, 5) for _ in range(chosen.requests)]
    requests = [request(number, found) for number, found in enumerate(served)]
    tokenizer.offsets(requests[0].segments[0].text)
    before, tokenizer.seconds, started = megabytes(), 0.0, process_time()
    done = segment_requests(requests, parse_strategies(["auto"]), tokenizer)
    seconds = process_time() - started
    print(done.steps[0].sentence())
    print(f"{seconds:.1f} s, {seconds - tokenizer.seconds:.1f} s without the tokenizer, {megabytes() - before:.0f} MB")
    cut = {part.text for one in done.requests for part in one.segments if part.kind == "document"}
    often = [text for text in DOCUMENTS if sum(text in found for found in served) > 1]
    whole = sum(sum(text in segment for segment in cut) == 1 for text in often)
    print(f"{whole} of {len(often)} documents that recur are one segment each")


if __name__ == "__main__":
    main()
