"""`kvaudit replay --compare-url`: two servers side by side, and what their own noise could explain."""

import sys

import orjson
import pytest
from fakes import rolling_trace, write_trace
from faulty_server import KEY, faulty_server
from starlette.responses import JSONResponse

from kvaudit import cli
from kvaudit.deployments.comparing import Compared, Told, outcome


@pytest.fixture
def compare(monkeypatch, capsys, tmp_path):
    """Run the command line here: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    trace = write_trace(tmp_path / "rolling.jsonl", rolling_trace(6, window=3))

    def run(before, after, *more):
        address = ["--engine", "server", "--base-url", before.url, "--compare-url", after.url, "--model", "m"]
        monkeypatch.setattr(sys, "argv", ["kvaudit", "replay", str(trace), *address, "-o", "d.json", *more])
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code, *capsys.readouterr()

    return run


def test_two_alike_differ_in_nothing(compare, tmp_path):
    with faulty_server() as before, faulty_server() as after:
        code, out, err = compare(before, after)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"before: {before.url}, model m; 0.0 % of its answers differ from run to run",
        f"after: {after.url}, model m; 0.0 % of its answers differ from run to run",
        "0 of 6 answers changed though each deployment gives its own again: 0.0 % (95 % interval 0.0 to 39.0 %).",
        "Answers: d.json",
    ]
    written = orjson.loads((tmp_path / "d.json").read_bytes())
    assert [row["became"] for row in written["requests"]] == ["same"] * 6
    assert (written["before"]["server"], written["after"]["server"]) == (before.url, after.url)
    assert before.resets == after.resets == 0


def test_what_changed_is_named(compare, tmp_path):
    with faulty_server() as before, faulty_server() as after:
        changed = [1 + request + 6 * turn for request in (1, 4) for turn in (0, 1)] + list(range(13, 17))
        after.behaviour.failures = {after.questions + question: other for question in changed}
        code, out, _ = compare(before, after)
    assert code == 1
    assert "2 of 6 answers changed" in out
    assert "Changed: r1, r4." in out
    rows = orjson.loads((tmp_path / "d.json").read_bytes())["requests"]
    assert {row["request_id"] for row in rows if row["became"] == "changed"} == {"r1", "r4"}
    assert rows[1]["after"][0]["text"] == "upgraded"


def test_what_changed_is_asked_again_and_may_turn_out_to_vary(compare):
    """Request r1 comes out otherwise twice, as an answer by the toss of a coin does, and the third time as before."""
    with faulty_server() as before, faulty_server() as after:
        after.behaviour.failures = {after.questions + 2: other, after.questions + 8: other, after.questions + 14: other}
        code, out, _ = compare(before, after)
    assert code == 0
    assert "1 of 6 answers vary from run to run, and are not compared." in out


def other():
    choice = {"index": 0, "text": "upgraded", "finish_reason": "stop"}
    return JSONResponse({"model": "m", "choices": [choice]})


def test_where_every_answer_varies_nothing_was_compared(compare):
    with faulty_server() as before, faulty_server("random") as after:
        code, out, _ = compare(before, after)
    assert code == 4
    assert "after: " in out
    assert "100.0 % of its answers differ from run to run" in out
    assert "6 of 6 answers vary from run to run, and are not compared." in out
    assert "Inconclusive: nothing was compared." in out
    assert "0.0 to" not in out


def test_where_every_answer_is_empty_nothing_was_compared(compare):
    with faulty_server() as before, faulty_server() as after:
        for server in (before, after):
            server.behaviour.failures = dict.fromkeys(range(1, 13), silence)
        code, out, _ = compare(before, after)
    assert code == 4
    assert "6 of 6 answers are empty, and are not compared." in out
    assert "Inconclusive: nothing was compared." in out


def silence():
    return JSONResponse({"model": "m", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})


def test_a_deployment_that_is_another_one_afterwards_is_none(compare):
    def upgraded():
        after.behaviour.version = "2.0"
        return other()

    with faulty_server() as before, faulty_server() as after:
        after.behaviour.failures = {9: upgraded}
        code, _, err = compare(before, after)
    assert code == 3
    assert "was changed: it was version 1.0, weights weights, it is version 2.0" in err


def test_a_folder_is_no_file_for_the_answers(compare, tmp_path):
    (tmp_path / "d.json").mkdir()
    with faulty_server() as before, faulty_server() as after:
        code, _, err = compare(before, after, "--force")
    assert code == 2
    assert "d.json is a folder" in err
    assert not before.questions


@pytest.mark.parametrize("place", ["d.txt/answers.json", "n" * 250 + ".json"])
def test_a_place_that_cannot_be_written_is_told_before_anything_is_asked(compare, tmp_path, place):
    (tmp_path / "d.txt").write_text("a file")
    with faulty_server() as before, faulty_server() as after:
        code, _, err = compare(before, after, "-o", place)
    assert code == 2
    assert f"cannot write {place}" in err
    assert "choose another place with -o" in err
    assert not before.questions


def test_the_outcome_is_told_even_where_the_answers_cannot_be_written(compare, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvaudit.cli.outputs.os.replace", full)
    with faulty_server() as before, faulty_server() as after:
        _, out, err = compare(before, after)
    assert "0 of 6 answers changed" in out
    assert "cannot write d.json: No space left on device" in err
    assert "finished arms" not in err


def too_long():
    return JSONResponse({"error": "too long"}, 400)


def test_requests_that_both_refuse_are_counted_and_not_compared(compare):
    with faulty_server() as before, faulty_server() as after:
        for server in (before, after):
            server.behaviour.failures = dict.fromkeys(range(1, 13), too_long)
        code, out, _ = compare(before, after)
    assert code == 4
    assert "6 of 6 requests were answered by neither, and are not compared." in out
    assert "Inconclusive: nothing was compared." in out


def broken():
    return JSONResponse({"error": {"message": "the crash"}}, 500)


@pytest.mark.parametrize(
    ("questions", "fails"),
    [([1, 7, 13, 14], too_long), ([1, 2, 8, 9, *range(15, 19)], broken)],
    ids=["refuses", "breaks, asked twice each time"],
)
def test_what_one_alone_does_not_answer_has_changed(compare, questions, fails):
    with faulty_server() as before, faulty_server() as after:
        after.behaviour.failures = dict.fromkeys(questions, fails)
        code, out, _ = compare(before, after, "--retries", "1")
    assert code == 1
    assert "1 of 6 answers changed" in out
    assert "Changed: r0. One of the deployments does not answer 1 of them." in out


def test_one_deployment_is_not_compared_with_itself(compare):
    with faulty_server() as server:
        code, _, err = compare(server, server)
    assert code == 2
    assert "--compare-url and --base-url are one deployment" in err
    assert not server.questions


def test_two_models_of_one_server_are_two_deployments(compare):
    with faulty_server(models_listed=False) as server:
        assert compare(server, server, "--compare-model", "m2")[0] == 0


@pytest.mark.parametrize("place", ["kvaudit.deployments.asking.compared", "kvaudit.engines.server.opening._asked"])
def test_a_comparison_that_is_interrupted_says_so(compare, monkeypatch, place):
    def stopped(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, stopped)
    with faulty_server() as before, faulty_server() as after:
        code, _, err = compare(before, after)
    assert code == 130
    assert "interrupted: nothing was compared, and no answer is kept" in err


def test_each_server_gets_its_own_key(compare, monkeypatch):
    monkeypatch.setenv("KVAUDIT_API_KEY", KEY)
    monkeypatch.setenv("KVAUDIT_OTHER_API_KEY", KEY + "-other")
    with faulty_server(key=KEY) as before, faulty_server(key=KEY + "-other") as after:
        code, out, _ = compare(before, after)
    assert code == 0
    assert KEY not in out


def test_a_file_that_is_there_is_not_replaced_unless_that_is_asked_for(compare, tmp_path):
    with faulty_server() as before, faulty_server() as after:
        (tmp_path / "d.json").write_text("mine")
        code, _, err = compare(before, after)
        assert code == 2
        assert "d.json is there already" in err
        assert compare(before, after, "--force")[0] == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--orders", "3"), "--orders"),
        (("--reset", "vllm"), "--reset"),
        (("--concurrency", "8"), "--concurrency"),
        (("--option", "reset=vllm"), "--reset"),
        (("--max-noise", "0.1"), "--max-noise"),
    ],
)
def test_what_audits_a_cache_has_no_use_here(compare, more, said):
    with faulty_server() as before, faulty_server() as after:
        code, _, err = compare(before, after, *more)
    assert code == 2
    assert f"{said} has no use" in err


NOTHING = ""


def row(name, before, after):
    return Compared(name, tuple(map(Told, before)), tuple(map(Told, after)))


def test_changes_that_noise_could_explain_are_inconclusive():
    noisy = [row(f"n{i}", "ab", "aa") for i in range(5)]
    same = [row(f"s{i}", "aa", "aa") for i in range(14)]
    found = outcome([*noisy, *same, row("c", "aa", "bb")])
    assert found.changed == ("c",)
    assert (found.answered, found.steady) == (20, 15)
    assert found.share.value == pytest.approx(1 / 15)
    assert found.noise_before.value == pytest.approx(0.25)
    assert found.explained == pytest.approx(found.noise_before.high)
    assert found.change == "inconclusive"
    assert outcome([*same, row("c", "aa", "bb")]).change == "changed"
    assert outcome([]).change == "inconclusive"
    assert outcome(noisy).change == "inconclusive"
    assert outcome([*noisy, same[0]]).share.n == 1
    assert outcome([*noisy, row("c", "aa", "bb")]).change == "inconclusive"


@pytest.mark.parametrize(("compared", "change"), [(5, "same"), (4, "inconclusive"), (0, "inconclusive")])
@pytest.mark.parametrize("left_out", [("ab", "aa"), ("aa", "ab"), ((NOTHING, NOTHING), (NOTHING, NOTHING))])
def test_that_nothing_changed_needs_half_of_the_requests(left_out, compared, change):
    others = [row(f"o{i}", *left_out) for i in range(10 - compared)]
    assert outcome([*others, *(row(f"s{i}", "aa", "aa") for i in range(compared))]).change == change


REFUSED = Told("", error="too long")


@pytest.mark.parametrize(
    ("before", "after", "became"),
    [
        ([REFUSED, REFUSED], [REFUSED, REFUSED], "failed"),
        ([Told("a"), Told("a")], [REFUSED, REFUSED], "changed"),
        ([REFUSED, REFUSED], [Told("a"), Told("a")], "changed"),
        ([Told(""), Told("")], [REFUSED, REFUSED], "changed"),
        ([Told("a"), REFUSED], [Told("a"), Told("a")], "noisy"),
    ],
)
def test_a_refusal_is_an_answer_of_its_own(before, after, became):
    assert Compared("r", tuple(before), tuple(after)).became == became


def test_answers_are_equal_by_ids_where_both_show_them():
    assert Told("x", (1, 2)).equals(Told("x", (1, 2)))
    assert not Told("x", (1, 2)).equals(Told("x", (3,)))
    assert Told("x", (1, 2)).equals(Told("x"))
    assert not Told("x").equals(Told("y"))
