"""What LMCache does when its store is full and when its chunk size is large; and vLLM without it."""

import pytest
from worker_jobs import prompt_of
from worker_rig import answers, open_rig, words

pytestmark = [pytest.mark.real, pytest.mark.model]

INSTRUCTION = words(99, 20)


def asking(*documents, query):
    parts = [("instruction", INSTRUCTION), *(("document", each) for each in documents), ("query", words(query, 12))]
    return prompt_of(*parts)


@pytest.fixture(scope="module")
def rig():
    """Room for about three prompts, and chunks of 64 tokens."""
    with open_rig(LMCACHE_MAX_LOCAL_CPU_SIZE="0.03", LMCACHE_CHUNK_SIZE="64") as opened:
        yield opened


DOCUMENTS = [words(seed, 150) for seed in range(5)]


def test_a_new_chunk_after_a_hit_is_lost_where_the_prompt_ends_before_the_next_whole_chunk(rig):
    rig.clear()
    rig.serve(asking(DOCUMENTS[0], query=1))
    _, record = rig.serve(asking(DOCUMENTS[0], query=2))
    assert record.looked_up == 172
    assert (record.chunks[-1].loaded, record.chunks[-1].stored) == (False, False)
    assert record.writes == ()
    assert record.errors == ()


def test_what_makes_room_is_told_as_an_eviction(rig):
    rig.clear()
    written, evicted = {}, []
    for query, pair in enumerate(zip(DOCUMENTS, DOCUMENTS[1:] + DOCUMENTS[:1], strict=True)):
        _, record = rig.serve(asking(*pair, query=query))
        assert record.errors == ()
        written |= {write.write_ordinal: write for write in record.writes}
        evicted += record.evictions
    assert evicted
    assert all(written[each.write_ordinal].content_id == each.content_id for each in evicted)
    held = {each["content_id"] for each in rig.keys().values()}
    gone = {each.write_ordinal for each in evicted}
    assert held == {write.content_id for ordinal, write in written.items() if ordinal not in gone}


def test_a_full_prefill_is_what_vllm_computes_without_lmcache(rig):
    prompt = asking(DOCUMENTS[2], query=3)
    rig.clear()
    rig.serve(asking(DOCUMENTS[1], query=1))
    with_lmcache, _ = rig.serve(prompt, "prefill", tokens=8)
    with open_rig(connector=False) as alone:
        without = alone.running.ask(prompt.token_ids, 8, lambda token: False, 5)
    assert answers(with_lmcache) == answers(without)
