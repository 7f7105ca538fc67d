"""Before a replay: what caches could reuse of a trace, and what in it spoils reuse. No GPU, no model is run.

pieces.py         a request's prompts, interned    findings.py   what lint found, by code, with its cost
prefix_caches.py  vLLM's and SGLang's rules        context.py    segments that tokenise otherwise in context
chunks.py         reuse at any position            volatile.py   text that changes before text that stays
reuse.py          each request's reuse             variants.py   segments that differ in form only
inspection.py     all of it over a trace           inside.py     texts that recur inside messages
hashed.py         requests known by hashes only    templates.py  chat templates that change earlier turns
facts.py          an inspection as data            page.py       as a page; plot.py: the strips on it
table.py          one row a request, as Parquet    common.py     what two sequences share at their ends
"""
