"""A page of thousands of requests opens at once."""

from __future__ import annotations

import time

import pytest
from large_audits import large_audit
from lxml import html
from report_audits import rendered

from kvaudit.reports.html import render

POLICIES = ("document-aligned", "single-window", "fixed-chunk", "random-document", "token-topk")


@pytest.mark.slow
def test_eight_thousand_requests_make_a_small_page_fast():
    audit = large_audit(8_000, POLICIES)
    start = time.perf_counter()
    source = rendered(render, audit)
    assert time.perf_counter() - start < 20
    assert len(source.encode()) < 3_000_000
    page = html.document_fromstring(source)
    assert len(page.xpath("//figure")) == 13
    assert max(len(table.xpath("./tbody/tr")) for table in page.iter("table")) <= 100


def test_the_page_grows_with_the_figures_not_with_the_requests():
    sizes = [len(rendered(render, large_audit(n, POLICIES[:2], ("chronological", "reversed")))) for n in (500, 2_000)]
    assert sizes[1] < 1.2 * sizes[0]
