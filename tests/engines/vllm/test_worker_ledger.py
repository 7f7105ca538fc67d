from worker_jobs import SEPARATOR, job_of

from kvaudit.engines.vllm.worker.ledger import Ledger, Loaded, content_id, provenance, segment_views
from kvaudit.prompts import tokens_digest

INSTRUCTION, FIRST, SECOND, QUERY = (1, 2, 3), (10, 11, 12, 13), (20, 21), (30, 31)
FIRST_JOB = job_of(("instruction", INSTRUCTION), ("document", FIRST), ("document", SECOND), request_id="first")
SWAPPED = job_of(("instruction", INSTRUCTION), ("document", SECOND), ("document", FIRST), request_id="second")
CHUNKS = [(0, 3), (5, 9), (11, 13)]


def written():
    ledger = Ledger()
    for key, where in zip("abc", CHUNKS, strict=True):
        ledger.put(key, FIRST_JOB, where, CHUNKS, [], 100)
    return ledger


def test_digests_are_those_of_prompts():
    assert content_id(FIRST) == tokens_digest(FIRST)


def test_a_write_says_what_was_written_where_and_over_what():
    ledger = written()
    writes, evictions = ledger.take_journal()
    assert [(w.write_ordinal, w.position, w.tokens, w.content_id) for w in writes] == [
        (0, 0, 3, content_id(INSTRUCTION)),
        (1, 5, 4, content_id(FIRST)),
        (2, 11, 2, content_id(SECOND)),
    ]
    assert writes[2].context_hash == content_id(FIRST_JOB.prompt.token_ids[:11])
    assert not evictions
    ledger.put("d", SWAPPED, (5, 7), [(0, 3), (5, 7)], [ledger.get("a")], 1)
    assert ledger.take_journal()[0][0].computed_over == (0,)
    assert ledger.get("c").over == (content_id(INSTRUCTION), content_id(FIRST))


def test_what_the_store_no_longer_holds_was_evicted():
    ledger = written()
    ledger.take_journal()
    ledger.keep({"a", "c"})
    assert [e.write_ordinal for e in ledger.take_journal()[1]] == [1]
    assert ledger.get("b") is None
    assert len(ledger) == 2


def test_a_key_that_comes_again_was_evicted_in_between():
    ledger = written()
    ledger.take_journal()
    ledger.put("b", SWAPPED, (9, 13), [(0, 3), (5, 7), (9, 13)], [], 100)
    writes, evictions = ledger.take_journal()
    assert [e.write_ordinal for e in evictions] == [1]
    assert (writes[0].write_ordinal, writes[0].position) == (3, 9)
    assert ledger.get("b").writer_request_id == "second"


def test_provenance_of_moved_segments():
    ledger = written()
    loaded = [Loaded(0, 3, ledger.get("a")), Loaded(5, 7, ledger.get("c")), Loaded(9, 13, ledger.get("b"))]
    made = provenance(SWAPPED.prompt, loaded)
    assert [(p.segment, p.write_ordinal, p.old_position, p.new_position) for p in made] == [
        (0, 0, 0, 0),
        (2, 2, 11, 5),
        (4, 1, 5, 9),
    ]
    assert {p.writer_request_id for p in made} == {"first"}
    assert made[0].context_hash_written == made[0].context_hash_now
    assert made[1].context_hash_written == content_id(FIRST_JOB.prompt.token_ids[:11])
    assert made[1].context_hash_now == content_id(SWAPPED.prompt.token_ids[:5])


def test_segments_inside_a_larger_chunk_have_their_own_places_in_it():
    """Where nothing separates segments, LMCache makes one chunk of several."""
    joined = job_of(("document", FIRST), ("document", SECOND), request_id="joined")
    ids = joined.prompt.token_ids
    ledger = Ledger()
    ledger.put("x", joined, (0, len(ids)), [(0, len(ids))], [], 1)
    again = job_of(("instruction", INSTRUCTION), ("document", FIRST), ("document", SECOND))
    made = provenance(again.prompt, [Loaded(5, 5 + len(ids), ledger.get("x"))])
    assert [(p.segment, p.old_position, p.new_position) for p in made] == [(2, 0, 5), (3, 4, 9), (4, 6, 11)]
    assert made[2].context_hash_written == content_id(FIRST + SEPARATOR)


def test_a_segment_is_a_hit_where_it_lies_within_a_loaded_chunk():
    views = segment_views(SWAPPED.prompt, [Loaded(0, 3, None), Loaded(5, 6, None)])
    assert [(view.kind, view.hit) for view in views[:3]] == [
        ("instruction", True),
        ("separator", False),
        ("document", False),
    ]
    assert views[0].written is None
    assert provenance(SWAPPED.prompt, [Loaded(0, 3, None)]) == ()
