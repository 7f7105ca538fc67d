"""The figures of the HTML report: what they draw, and that they are the page's own."""

from __future__ import annotations

import base64
import io
import re
import subprocess
import sys

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from audit_runs import arm_lines, full_prefill, run
from large_audits import large_audit
from lxml import html
from report_audits import audited, rendered, rich_run

from kvaudit.analysis.compare import DIFFERENT, EQUAL, NOT_COMPARABLE
from kvaudit.analysis.figures import Figure
from kvaudit.reports.html import damage, drawing, render, work
from kvaudit.reports.html.answers import point
from kvaudit.reports.html.charts import (
    MOST_COLUMNS,
    Group,
    Point,
    columns_of,
    cumulative,
    forest,
    painted,
    requests_a_column,
)

FLIP = [213, 94, 0]


@pytest.fixture(scope="module")
def rich():
    return audited(rich_run())


@pytest.fixture(scope="module")
def source(rich):
    return rendered(render, rich)


def parsed(audit):
    return html.document_fromstring(rendered(render, audit))


def image_of(page, figure):
    (source,) = page.xpath(f"//figure[@id='figure-{figure}']//image/@*[local-name()='xlink:href']")
    content = base64.b64decode(source.removeprefix("data:image/png;base64,"))
    return np.round(255 * matplotlib.image.imread(io.BytesIO(content))).astype(int)


@pytest.mark.parametrize("requests", [1, MOST_COLUMNS, MOST_COLUMNS + 1, 8000, 39_999])
def test_downsampling_never_hides_a_flip(requests):
    for flipped in {0, requests // 2, requests - 1}:
        agreement = np.full((2, requests), EQUAL, np.int8)
        agreement[1, flipped] = DIFFERENT
        pixels = painted(columns_of(agreement))
        assert pixels.shape[1] <= MOST_COLUMNS
        assert not pixels[0].any()
        (column,) = np.flatnonzero(pixels[1, :, 3])
        assert column == flipped // requests_a_column(requests)
        assert pixels[1, column, :3].tolist() == FLIP
        assert pixels[1, column, 3] >= 64


def test_more_flips_are_stronger_and_the_unknown_is_neither():
    agreement = np.full((1, 4 * MOST_COLUMNS), EQUAL, np.int8)
    agreement[0, 4:5], agreement[0, 8:12], agreement[0, 12:16] = DIFFERENT, DIFFERENT, NOT_COMPARABLE
    agreement[0, 16:19], agreement[0, 19] = NOT_COMPARABLE, DIFFERENT
    pixels = painted(columns_of(agreement))[0]
    assert pixels[0, 3] == 0
    assert 0 < pixels[1, 3] < pixels[2, 3] == 255
    assert pixels[3, :3].tolist() == [128, 128, 128]
    assert 0 < pixels[3, 3] < 255
    assert pixels[4].tolist() == [*FLIP, 255]


def test_the_page_shows_each_flip_where_it_happened():
    lines = arm_lines("token-topk", {"chronological": "x b c d", "reversed": "a x c -"}, "a b c d", "a b c d")
    page = parsed(audited(run(full_prefill("a b c d") + lines)))
    pixels = image_of(page, "flips-0")
    assert pixels.shape[:2] == (3, 4)
    assert np.argwhere((pixels[:, :, :3] == FLIP).all(axis=2) & (pixels[:, :, 3] > 0)).tolist() == [[0, 0], [1, 1]]
    assert pixels[1, 3, :3].tolist() == [128, 128, 128]
    label = page.xpath("//figure[@id='figure-flips-0']/svg/@aria-label")[0]
    assert "chronological 1 of 4; reversed 1 of 3; (reset) 0 of 4" in label
    assert "not comparable" in page.get_element_by_id("figure-flips-0").text_content()


def test_a_page_with_more_requests_than_columns_says_what_a_column_stands_for(source):
    page = parsed(large_audit(1000, ["p"], ("chronological", "reversed")))
    shown = " ".join(page.get_element_by_id("where").text_content().split())
    assert "1,000 requests are more than fit side by side: a column stands for 3 successive requests" in shown
    assert image_of(page, "flips-0").shape[1] == 334
    assert "a column stands for" not in source


def test_colours_are_the_pages_and_none_is_left_over(source):
    (style,) = re.findall(r"<style>(.*?)</style>", source, re.DOTALL)
    used = set(re.findall(r"var\(--(\w+)\)", source.replace(style, "")))
    assert {"ink", "soft", "line", "paper", "s0", "s1"} <= used
    assert used <= set(re.findall(r"--(\w+):", style))
    drawn = re.findall(r"<(?:path|g|text|use|rect)\b[^>]*>", source)
    assert not [tag for tag in drawn if re.search(r"#[0-9a-f]{6}\b", re.sub(r'href="#[^"]*"', "", tag))]


def test_light_and_dark_define_the_same_colours(source):
    blocks = re.findall(r":root \{(.*?)\}", source, re.DOTALL)
    names = [sorted(re.findall(r"--(\w+):", block)) for block in blocks]
    assert len(names) == 3
    assert names[0] == names[1] == names[2]


def test_points_are_drawn_where_their_values_are():
    marks = [drawing.policy_mark(0)] * 3
    shares = [Figure("fidelity", value=share, low=share, high=share) for share in (0.0, 0.25, 1.0)]
    group = Group("p", [point(share, mark) for share, mark in zip(shares, marks, strict=True)])
    tree = html.fragment_fromstring(str(forest("f", [group], "axis", "summary", (0, 100))))
    left, quarter, right = (float(use.get("x")) for use in tree.xpath("//use[contains(@style, '--s0')]")[2::3])
    assert (quarter - left) / (right - left) == pytest.approx(0.25, abs=1e-4)
    axis = {text.text: float(text.get("x")) for text in tree.iter("text") if (text.text or "").isdigit()}
    assert (left, right) == pytest.approx((axis["0"], axis["100"]), abs=0.01)


def test_names_that_look_like_colours_maths_or_markup_stay_names():
    name = r"#010100 $x^2$ <b>&amp; \frac{"
    svg = forest("f", [Group(name, [Point(drawing.policy_mark(0), 50, 40, 60)])], "axis", name, (0, 100))
    tree = html.fragment_fromstring(str(svg))
    assert name in [text.text for text in tree.iter("text")]
    assert tree.get("aria-label") == name


def test_a_name_in_any_script_draws_without_a_warning(recwarn):
    group = Group("\u65e5\u672c\u8a9e\u306e\u65b9\u91dd", [Point(drawing.policy_mark(0), 50, 40, 60)])
    assert "\u65e5\u672c\u8a9e" in forest("f", [group], "axis", "summary", (0, 100))
    assert not recwarn.list


def test_drawing_leaves_matplotlibs_settings_alone_and_ignores_the_users(monkeypatch):
    groups = [Group("a", [Point(drawing.policy_mark(0), 50, 40, 60)])]
    plain = forest("f", groups, "axis", "summary", (0, 100))
    monkeypatch.setitem(matplotlib.rcParams, "lines.markeredgewidth", 9.0)
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "path")
    before = dict(matplotlib.rcParams)
    assert forest("f", groups, "axis", "summary", (0, 100)) == plain
    assert dict(matplotlib.rcParams) == before


def test_figures_do_not_load_pyplot():
    program = """
import sys
from audit_runs import clean, run
from report_audits import audited, rendered
from kvaudit.reports.html import render
early = {"matplotlib", "jinja2"} & set(sys.modules)
rendered(render, audited(run(clean())))
print(early, "matplotlib.pyplot" in sys.modules)
"""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["set()", "False"]
    assert not done.stderr


def test_each_differing_answer_is_counted_once_at_its_token(rich):
    (picture,) = damage._first_difference(rich)
    differing = sum(
        int(pair.differs.sum())
        for pair in rich.pairs
        if pair.kind == "reference" and rich.grid.arms[pair.right].control == "none"
    )
    counts = [
        int(count.replace(",", "")) for count in re.findall(r"([\d,]+) answers?, median token 2", picture.summary)
    ]
    assert len(counts) == 2
    assert sum(counts) == differing


def test_margins_are_those_at_the_first_difference():
    lines = arm_lines("p", {"chronological": "a b c", "reversed": "a x y"}, "a b c", "a b c")
    margins = {1: 0.25, 2: 0.75}
    built = run(
        full_prefill("a b c") + lines,
        columns=lambda arm, index: {"margin": margins.get(index, 9.0) if arm.order == "reversed" else 7.0},
    )
    (picture,) = damage._margins(audited(built))
    assert "p 0.50." in picture.summary


def test_reuse_is_binned_by_position():
    lines = arm_lines("p", {"chronological": "a b c", "reversed": "a b c"}, "a b c", "a b c")
    built = run(
        full_prefill("a b c") + lines,
        columns=lambda arm, index: {"reused_tokens": 10 * (index if arm.order == "chronological" else 2 - index)},
    )
    places, low, middle, high = work._reuse_by_position(audited(built), "p")
    assert places.tolist() == [1, 2, 3]
    assert low.tolist() == middle.tolist() == high.tolist() == [0, 10, 20]


def test_a_cumulative_curve_has_as_many_points_for_any_number_of_answers():
    values, shares = cumulative(np.arange(100_001.0))
    assert len(values) == len(shares) == 101
    assert values[50] == 50_000
    assert shares[50] == 50
