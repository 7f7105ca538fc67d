"""The embedded engine: serves one prompt at a time with persistent reuse of chunks, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from time import perf_counter
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from kvaudit.engines import Capabilities, ChunkRules, EngineSettings, Rows, Tokenizer
from kvaudit.engines.embedded.auxiliary import Auxiliary
from kvaudit.engines.embedded.blend import Blender, Prefilled
from kvaudit.engines.embedded.decode import NEAR_TIE, Check, check, greedy, margins_of, reference_of
from kvaudit.engines.embedded.forward import Transformer
from kvaudit.engines.embedded.lookup import empty_cache
from kvaudit.engines.embedded.weights import Weights
from kvaudit.engines.endings import Answer, Ending
from kvaudit.errors import EngineError, UsageError
from kvaudit.policies import Need, Policy, Positions
from kvaudit.records import (
    CacheState,
    Part,
    Prompt,
    Provenance,
    Reference,
    Sampling,
    Selection,
    Served,
    runs,
)

EVERY_SIGNAL: frozenset[Need] = frozenset(get_args(Need))


class EmbeddedEngine:
    """Implements `kvaudit.engines.Probed` over weights in this process.

    `identity` is what `describe` adds about the model: its name, digest and tokenizer. Without `auxiliary`, a policy
    that asks for its attention is refused.
    """

    def __init__(
        self,
        weights: Weights,
        tokenizer: Tokenizer,
        settings: EngineSettings,
        identity: Mapping[str, object],
        auxiliary: Auxiliary | None = None,
    ) -> None:
        switches = settings.switches
        if not 0 <= switches.check_layer < len(weights.layers):
            raise UsageError(
                f"check layer {switches.check_layer} does not exist",
                f"the model has layers 0 to {len(weights.layers) - 1}",
            )
        self.transformer = Transformer(weights)
        self.cache = empty_cache(switches, self.transformer.token_bytes)
        attention = None if auxiliary is None else auxiliary.attention
        ratio, seed = settings.recompute_ratio, settings.seed
        self.blender = Blender(self.transformer, self.cache, switches, ratio, seed, attention)
        self._tokenizer, self._settings, self._identity = tokenizer, settings, identity
        self._auxiliary = auxiliary

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            policies=True,
            max_prompt_tokens=self.transformer.weights.max_positions,
            vocabulary_size=self.transformer.weights.vocabulary,
            signals=EVERY_SIGNAL if self._auxiliary is not None else EVERY_SIGNAL - {"auxiliary-attention"},
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def describe(self) -> dict[str, object]:
        import transformers

        device = self.transformer.device
        return {
            **self._identity,
            "family": self.transformer.weights.family,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "dtype": str(self.transformer.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "switches": asdict(self._settings.switches),
            "recompute_ratio": self._settings.recompute_ratio,
            **({} if self._auxiliary is None else self._auxiliary.describe()),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    @torch.inference_mode()
    def serve(
        self,
        request_id: str,
        part: Part,
        prompt: Prompt,
        sampling: Sampling,
        policy: Policy | None,
        reference: Reference | None = None,
    ) -> Served:
        self._settle(len(prompt.token_ids) + sampling.max_tokens)
        if self._auxiliary is not None and policy is not None and "auxiliary-attention" in policy.needs:
            self._auxiliary.open()
        untimed = 0.0 if policy is None else policy.untimed_seconds
        began = perf_counter()
        if policy is None:
            prefilled = self.blender.full_prefill(prompt)
        else:
            found = self.blender.look_up(request_id, part, prompt)
            if sampling.max_tokens == 0 and not self.blender.writes_back(found):
                return self._nothing_to_write(prompt, found.existed)
            prefilled = self.blender.prefill(request_id, prompt, found, policy)
        prefilled.logits.argmax().item()
        began += 0.0 if policy is None else policy.untimed_seconds - untimed
        ttft = 1000 * (perf_counter() - began)
        selection, measured = self._selection(prefilled, sampling)
        began += measured
        if policy is not None:
            self.blender.write_back(request_id, part, prompt, prefilled)
        facts = self._facts(prompt, prefilled) | {"ttft_ms": ttft, "selection": selection}
        if sampling.max_tokens == 0:
            return Served((), "", "length", total_ms=1000 * (perf_counter() - began), **facts)
        if reference is None:
            answer, rows = self._decode(prompt, prefilled, sampling)
            total = 1000 * (perf_counter() - began)
            made = reference_of(answer, rows) if policy is None else None
            return Served(
                answer.token_ids,
                answer.text,
                answer.finish_reason,
                total_ms=total,
                margin=float(margins_of(torch.stack(rows)).min()),
                reference=made,
                **facts,
            )
        answer, checked, margin = self._answer_against(prompt, prefilled, sampling, reference)
        return Served(
            answer.token_ids,
            answer.text,
            answer.finish_reason,
            kl=checked.kl,
            reference_logprob=checked.logprob,
            margin=margin,
            **facts,
        )

    @torch.inference_mode()
    def prefill(self, request_id: str, part: Part, prompt: Prompt, policy: Policy | None) -> Prefilled:
        """The prefill and write-back of `serve` alone, with the mixed cache open to inspection."""
        self._settle(len(prompt.token_ids))
        if policy is None:
            return self.blender.full_prefill(prompt)
        found = self.blender.look_up(request_id, part, prompt)
        prefilled = self.blender.prefill(request_id, prompt, found, policy)
        self.blender.write_back(request_id, part, prompt, prefilled)
        return prefilled

    @property
    def chunk_rules(self) -> ChunkRules:
        return ChunkRules()

    def rows(self, request_id: str, prompt: Prompt, policy: Policy, positions: Positions) -> Rows:
        served = self.serve(request_id, "request", prompt, Sampling(1), policy)
        at = torch.from_numpy(positions).to(self.transformer.device)
        shown = self.blender.arena.index_select(3, at).float().transpose(2, 3).cpu().numpy()
        return Rows(served, shown[:, 0], shown[:, 1])

    def reset(self) -> CacheState:
        self.cache.clear()
        return CacheState(len(self.cache), self.cache.size_bytes)

    def close(self) -> None:
        self.reset()

    def _settle(self, tokens: int) -> None:
        """Make room, and let earlier work on the device end, so that it is not timed with this prompt."""
        self.blender.reserve(tokens)
        if self.transformer.device.type == "cuda":
            torch.cuda.synchronize(self.transformer.device)

    def _decode(self, prompt: Prompt, prefilled: Prefilled, sampling: Sampling) -> tuple[Answer, list[Tensor]]:
        tokens = len(prompt.token_ids)

        def step(token_id: int, index: int) -> Tensor:
            hidden = self.transformer.extend([token_id], self.blender.arena, tokens + index)
            return self.transformer.logits(hidden)[0]

        return greedy(prefilled.logits, self._ending(sampling), step)

    def _answer_against(
        self, prompt: Prompt, prefilled: Prefilled, sampling: Sampling, reference: Reference
    ) -> tuple[Answer, Check, float]:
        """The greedy answer, the check against the reference, and the margin where they part (else the smallest).

        One teacher-forced pass tells that every greedy choice is the reference's own; then the answer is too. Where
        a choice differs, or a margin is so small that rounding might decide it, the answer is decoded step by step.
        """
        forced = reference.generated_ids
        if not 0 < len(forced) <= sampling.max_tokens:
            raise EngineError(
                f"the reference answer has {len(forced)} tokens, the limit is {sampling.max_tokens}",
                "a reference is made with the sampling that it is held against",
            )
        logits = prefilled.logits[None]
        if len(forced) > 1:
            hidden = self.transformer.extend(forced[:-1], self.blender.arena, len(prompt.token_ids), every_row=True)
            logits = torch.cat((logits, self.transformer.logits(hidden)))
        checked = check(logits, reference)
        same = bool((checked.choices == np.asarray(forced)).all())
        clear = bool((checked.margins[1:] >= NEAR_TIE[self.transformer.dtype]).all())
        answer = self._replayed(forced, sampling) if same and clear else None
        if answer is None:
            answer, _ = self._decode(prompt, prefilled, sampling)
        parted = next((i for i, (a, b) in enumerate(zip(answer.generated, forced, strict=False)) if a != b), None)
        margin = checked.margins.min() if parted is None else checked.margins[parted]
        return answer, checked, float(margin)

    def _replayed(self, generated: tuple[int, ...], sampling: Sampling) -> Answer | None:
        """The answer that these tokens make, ended as decoding would end it; None if they do not end it."""
        ending = self._ending(sampling)
        any(ending.push(token_id) for token_id in generated)
        return ending.answer

    def _ending(self, sampling: Sampling) -> Ending:
        return Ending(self._tokenizer, sampling, self.transformer.weights.end_ids)

    def _nothing_to_write(self, prompt: Prompt, existed: tuple[bool, ...]) -> Served:
        """A prelude that would store nothing leaves no trace: what it would compute is not computed."""
        writes, evictions = self.cache.take_journal()
        reused = sum(s.end - s.start for s, there in zip(prompt.segments, existed, strict=True) if there)
        return Served((), "", "length", len(prompt.token_ids), reused_tokens=reused, writes=writes, evictions=evictions)

    def _facts(self, prompt: Prompt, prefilled: Prefilled) -> dict[str, Any]:
        choice = prefilled.choice
        writes, evictions = self.cache.take_journal()
        return {
            "prompt_tokens": len(prompt.token_ids),
            "reused_tokens": prefilled.reused_tokens,
            "reusable_tokens": len(choice.reusable),
            "recomputed_tokens": choice.recomputed,
            "budget_k": choice.budget,
            "provenance": _provenance(prompt, prefilled),
            "writes": writes,
            "evictions": evictions,
        }

    def _selection(self, prefilled: Prefilled, sampling: Sampling) -> tuple[Selection | None, float]:
        """The selection as it is recorded (none for a prelude), and the seconds that went into measuring it.

        A deviation that no policy asked for is computed here: it costs the request neither TTFT nor time in all.
        """
        choice = prefilled.choice
        if not len(choice.reusable) or sampling.max_tokens == 0:
            return None, 0.0
        began = perf_counter()
        at = np.searchsorted(choice.reusable, choice.selected)
        spans = tuple(runs(choice.selected.tolist()))
        chosen = choice.deviation[at].astype(np.float64)
        sums = np.concatenate(([0.0], chosen.cumsum()))
        lengths = np.array([end - start for start, end in spans], dtype=np.int64)
        ends = lengths.cumsum()
        selection = Selection(
            choice.layer,
            spans,
            tuple((sums[ends] - sums[ends - lengths]).tolist()),
            float(choice.deviation.astype(np.float64).sum()),
        )
        return selection, perf_counter() - began


def _provenance(prompt: Prompt, prefilled: Prefilled) -> tuple[Provenance, ...]:
    found = prefilled.found
    return tuple(
        Provenance(
            segment=index,
            content_id=segment.content_id,
            writer_request_id=entry.writer_request_id,
            writer_part=entry.writer_part,
            write_ordinal=entry.write_ordinal,
            old_position=entry.position,
            new_position=segment.start,
            context_hash_written=entry.context_hash,
            context_hash_now=found.contexts[index],
        )
        for index, (segment, entry) in enumerate(zip(prompt.segments, found.used, strict=True))
        if entry is not None and found.existed[index]
    )
