"""Event streams: templates, keys, channels, times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvaudit.errors import KvauditError, TraceError, UsageError
from kvaudit.traces.events import Event, EventColumns, Events, read_events

PRICES = "date,symbol,close\n2013-01-02,A,1\n2013-01-02,B,2\n2013-01-03,A,3\n2013-01-04,B,4\n"
NEWS = """{"date": "2013-01-03T09:30:00", "symbol": "A", "title": "up"}
{"date": "2013-01-02", "symbol": "A", "title": "late"}
"""


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.csv"
    path.write_text(PRICES)
    return path


@pytest.fixture
def news(tmp_path: Path) -> Path:
    path = tmp_path / "news.jsonl"
    path.write_text(NEWS)
    return path


@pytest.fixture
def in_new_york() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


def documents(events: Events) -> dict[str, list[str]]:
    return {key: [event.document for event in stream] for key, stream in events.streams.items()}


def refusal(*paths: Path, columns: EventColumns) -> KvauditError:
    with pytest.raises(KvauditError) as caught:
        read_events(paths, columns, "all")
    return caught.value


def test_by_default_a_row_is_begun_again_up_to_its_last_column(prices: Path) -> None:
    events = read_events([prices], EventColumns(), "all")

    assert events.headings == "date,symbol,close\n"
    assert events.streams["all"][0] == Event("2013-01-02,A,1\n", "\n2013-01-02,A,", "1", 0, None)


def test_templates_make_documents_questions_and_answers(prices: Path) -> None:
    columns = EventColumns(time="date", document=["{symbol}: {close}"], question=["{symbol}?"], answer=["={close}"])

    first = read_events([prices], columns, "all").streams["all"][0]

    assert first == Event("A: 1", "A?", "=1", 1357084800.0, 1357084800.0)


def test_each_key_has_its_own_stream(prices: Path) -> None:
    events = read_events([prices], EventColumns(key="symbol", document=["{close}"]), "all")

    assert documents(events) == {"A": ["1", "3"], "B": ["2", "4"]}


def test_without_a_time_the_order_is_that_of_the_file(prices: Path) -> None:
    events = read_events([prices], EventColumns(channel="symbol", document=["{close}"]), "all")

    assert documents(events) == {"all": ["1", "2", "3", "4"]}


def test_tables_are_interleaved_by_time_and_keep_their_own_order(prices: Path, news: Path) -> None:
    columns = EventColumns(time="date", document=["prices={close}", "news={title}"])

    assert documents(read_events([prices, news], columns, "all")) == {"all": ["1", "2", "3", "up", "late", "4"]}
    assert documents(read_events([news, prices], columns, "all")) == {"all": ["1", "2", "3", "up", "late", "4"]}


def test_at_the_same_time_the_first_table_comes_first(prices: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("date,close\n2013-01-02,x\n")
    columns = EventColumns(time="date", document=["{close}"])

    assert documents(read_events([prices, other], columns, "all"))["all"][:3] == ["1", "2", "x"]
    assert documents(read_events([other, prices], columns, "all"))["all"][:3] == ["x", "1", "2"]


def test_several_tables_and_keys(prices: Path, news: Path) -> None:
    columns = EventColumns(key="symbol", time="date", document=["{close}", "news={title}"])

    events = read_events([prices, news], columns, "all")

    assert documents(events) == {"A": ["1", "3", "up", "late"], "B": ["2", "4"]}
    assert events.headings == "prices: date,symbol,close\nnews: date,symbol,title\n"


def test_a_column_may_hold_the_channel(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    path.write_text("date,kind,text\n2013-01-05,p,1\n2013-01-06,p,2\n2013-01-03,n,3\n2013-01-09,n,4\n")
    columns = EventColumns(channel="kind", time="date", document=["{text}", "n=news {text}"])

    assert documents(read_events([path], columns, "all")) == {"all": ["news 3", "1", "2", "news 4"]}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.lists(st.integers(0, 20)), min_size=2, max_size=4))
def test_interleaving_keeps_all_events_and_each_table_in_order(tmp_path: Path, tables: list[list[int]]) -> None:
    paths = []
    for index, times in enumerate(tables):
        paths.append(tmp_path / f"t{index}.csv")
        paths[-1].write_text("time,row\n" + "".join(f"{time},{row}\n" for row, time in enumerate(times)))
    if not any(tables):
        return

    columns = EventColumns(time="time", document=[f"t{index}={index} {{row}}" for index in range(len(tables))])
    stream = documents(read_events(paths, columns, "all"))["all"]

    for index, times in enumerate(tables):
        assert [text for text in stream if text.startswith(f"{index} ")] == [f"{index} {n}" for n in range(len(times))]
    assert len(stream) == sum(map(len, tables))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-02", 86400),
        ("1970-01-01 00:00:10", 10),
        ("1970-01-01T00:00:10.5Z", 10.5),
        ("1970-01-01T02:00:00+02:00", 0),
        ("1357084800", 1357084800),
        ("12.5", 12.5),
    ],
)
@pytest.mark.usefixtures("in_new_york")
def test_times(tmp_path: Path, text: str, seconds: float) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"time,x\n{text},1\n")

    assert read_events([path], EventColumns(time="time"), "all").streams["all"][0].timestamp == seconds


@pytest.mark.parametrize("text", ["", "yesterday", "nan", "inf", "2013-13-01"])
def test_what_is_no_time_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"time,x\n1970-01-01,1\n{text},1\n")

    error = refusal(path, columns=EventColumns(time="time"))

    assert isinstance(error, TraceError)
    assert error.message == f"{path}, line 3: {text!r} is no time"


@pytest.mark.parametrize("option", ["key", "time", "channel", "document", "question", "answer"])
def test_unknown_columns_are_refused_with_those_that_exist(prices: Path, option: str) -> None:
    named = "nothing" if option in ("key", "time", "channel") else ["{nothing}"]

    error = refusal(prices, columns=EventColumns(**{option: named}))  # type: ignore[arg-type]

    assert isinstance(error, UsageError)
    assert error.message == f"--{option} names the column 'nothing', which {prices} does not have"
    assert error.hint == "columns: date, symbol, close"


def test_what_does_not_fit_is_refused(prices: Path, news: Path, tmp_path: Path) -> None:
    assert refusal(prices, news, columns=EventColumns()).hint == "name the column that holds it: --time COLUMN"
    assert "two tables are called 'prices'" in refusal(prices, prices, columns=EventColumns(time="date")).message
    wrong_channel = EventColumns(time="date", document=["nwes={title}", "{symbol}"])
    assert "a template for the channel 'nwes'" in refusal(prices, news, columns=wrong_channel).message

    path = tmp_path / "gaps.csv"
    path.write_text("key,text\nA,x\n,y\n")
    assert refusal(path, columns=EventColumns(key="key")).message == f"{path}, line 3: the column 'key' is empty"
    assert refusal(path, columns=EventColumns(channel="key")).message == f"{path}, line 3: the column 'key' is empty"
    no_text = refusal(path, columns=EventColumns(document=["{key}"]))
    assert no_text.message == f"{path}, line 3: the template gives no text for this row"
    path.write_text("key,text\n")
    assert refusal(path, columns=EventColumns()).message == f"{path}: there are no rows"
