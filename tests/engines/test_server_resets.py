"""Resets that are refused: which are waited for, which end an audit at once, and what is said of them."""

import json
import ssl
import time

import pytest
from faulty_server import KEY, running
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from kvaudit.engines.server.options import read_options
from kvaudit.engines.server.presets import PRESETS
from kvaudit.engines.server.refusals import is_busy, refused
from kvaudit.engines.server.resetting import Resetter
from kvaudit.engines.server.sending import Connection
from kvaudit.errors import EngineError

SGLANG = "Cache flushed.\nPlease check logs. (When there are running or waiting requests, nothing will be performed.)\n"
PAGE = "<!doctype html><title>Sign in</title>"


@pytest.fixture
def resetter():
    """Resets a server that answers so, in turn, the last one for ever; (resetter, bodies that came)."""
    opened = []

    def make(*answers, patience="0.3", key=None, **given):
        bodies, left = [], list(answers)

        async def answer(request):
            bodies.append((await request.body()).decode())
            made = left.pop(0) if len(left) > 1 else left[0]
            return made if isinstance(made, Response) else await made()

        context = running(Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])]))
        url = f"http://{context.__enter__()}"
        way = given or {"reset_url": f"{url}/flush"}
        options = {"base_url": f"{url}/v1", "patience": patience, **way}
        read = read_options({name.replace("_", "-"): value for name, value in options.items()})
        connection = Connection(read.base_url, key, ssl.create_default_context(), 60.0)
        opened.append((context, connection))
        return Resetter(read, connection, lambda seconds: time.sleep(0.01)), bodies

    yield make
    for context, connection in opened:
        connection.close()
        context.__exit__(None, None, None)


@pytest.mark.parametrize(
    "answer",
    [
        JSONResponse({"detail": "no such field"}, 400),
        JSONResponse({"detail": "wrong key"}, 401),
        PlainTextResponse("gone", 410),
        JSONResponse({"detail": "field required"}, 422),
        RedirectResponse("http://other/flush", 308),
        PlainTextResponse("not implemented", 501),
        HTMLResponse(PAGE),
        JSONResponse({"status": "error", "message": "no such cache"}),
        JSONResponse({"success": False, "message": "prefix caching is off"}),
        JSONResponse({"status": "denied"}),
        JSONResponse({"code": 1, "msg": "boom"}),
        PlainTextResponse("NOK"),
        PlainTextResponse("oops", 500),
        PlainTextResponse("not idle", 400),
    ],
)
def test_what_is_refused_for_good_is_asked_once(resetter, answer):
    made, bodies = resetter(answer, patience="1")
    with pytest.raises(EngineError, match=r"cannot be emptied: POST http://.*/flush answers status \d+"):
        made.run()
    assert len(bodies) == 1


@pytest.mark.parametrize(
    "answer",
    [
        JSONResponse({"success": False}),
        JSONResponse({"success": "false"}),
        JSONResponse({"status": "busy"}),
        JSONResponse({"success": False, "message": "3 requests are pending"}),
        JSONResponse({"is_success": False}),
        PlainTextResponse("Skipped: 3 requests active"),
        JSONResponse({"status": "in_progress"}),
        PlainTextResponse(SGLANG, 400),
        JSONResponse({}, 409),
        JSONResponse({}, 423),
        JSONResponse({}, 429),
        JSONResponse({}, 503),
        HTMLResponse(PAGE, 503),
    ],
)
def test_what_is_busy_is_waited_for_and_not_for_ever(resetter, answer):
    made, bodies = resetter(answer, answer, JSONResponse({"success": True}))
    made.run()
    assert len(bodies) == 3
    made, bodies = resetter(answer)
    with pytest.raises(EngineError, match=r"not emptied within 0\.3 s") as never:
        made.run()
    assert len(bodies) > 2
    assert "--patience waits longer" in never.value.hint


@pytest.mark.parametrize("preset", ["sglang", "akv"])
def test_sglang_says_400_where_it_is_busy_whatever_its_words(resetter, preset):
    made, bodies = resetter(PlainTextResponse("Flush cache failed.\n", 400), PlainTextResponse(SGLANG), reset=preset)
    made.run()
    assert len(bodies) == 2
    assert not is_busy(400, "Flush cache failed.", PRESETS["vllm"].busy)


def test_a_reset_that_hangs_is_bounded_by_what_is_left_of_the_patience(resetter):
    async def hang():
        import anyio

        await anyio.sleep(3)
        return PlainTextResponse("late")

    made, _ = resetter(JSONResponse({"success": False}), hang, patience="0.4")
    began = time.monotonic()
    with pytest.raises(EngineError, match="nothing came within the time limit") as late:
        made.run()
    assert time.monotonic() - began < 2
    assert late.value.hint == "--patience waits longer"


def test_a_page_and_a_redirect_are_named(resetter):
    for answer, said in ((HTMLResponse(PAGE), "'Sign in' came"), (RedirectResponse("/x?key=1"), "sends on to /x")):
        with pytest.raises(EngineError) as vain:
            resetter(answer)[0].run()
        assert vain.value.message.endswith(said)


@pytest.mark.parametrize(
    "body",
    [
        '{"success": "False"}',
        '{"success": 0}',
        '{"Success": false}',
        '{"is_success": false}',
        '{"isSuccess": "no"}',
        '{"success": "denied"}',
        '{"ok": 0}',
        '{"flushed": false}',
        '{"reset": "refused"}',
        '{"status": "skipped"}',
        '{"status": "ERROR: no engine"}',
        '{"status": "failure"}',
        '{"status": "not_ready"}',
        '{"status": "503"}',
        '{"status": 500}',
        '{"code": 1, "msg": "boom"}',
        '{"code": 404, "message": "x"}',
        '{"state": "timed out"}',
        '{"result": false}',
        '{"result": {"success": false}}',
        '{"workers": [{"success": true}, {"success": false}]}',
        '[{"ok": true}, {"ok": false}]',
        '{"errors": ["no engine"]}',
        '{"error": {"code": 403, "message": "forbidden"}}',
        '{"busy": 1}',
        "false",
        '"error"',
        "NOK",
        "Error: no engine",
        "Skipped: 3 requests active",
        "unauthorized",
        PAGE,
        "\n <html><body>Welcome</body></html>",
    ],
)
def test_what_a_body_denies_is_not_done(body):
    assert refused(200, body).startswith("status 200")


@pytest.mark.parametrize(
    "body",
    [
        SGLANG,
        "OK",
        "",
        "[]",
        "All caches cleared, errors: 0",
        "null",
        "true",
        "{}",
        "12",
        '"done"',
        '{"success": true, "message": "0 errors"}',
        '{"success": "True"}',
        '{"ok": 1}',
        '{"status": "success", "errors": [], "error": null, "failed": 0}',
        '{"status": "ok", "code": 0, "error": ""}',
        '{"status": 200}',
        '{"result": "no entries were there"}',
        '{"flushed": 0, "cleared": 0}',
        '{"error": "none"}',
        '{"error": {"code": 0, "message": ""}}',
        '{"status": "success", "message": "cleared; 2 workers are not ready"}',
        '{"status": "success", "message": "5 blocks were not in use"}',
        '{"message": "errors cleared, cache reset"}',
        '{"cleared": {"ok": 0, "failed": 0}}',
        '{"id_slot": 0, "n_erased": 3}',
        '{"message": "flushed without error"}',
        '{"success": true, "message": "nothing is running, 3 failed requests were dropped"}',
    ],
)
def test_what_a_body_grants_is_done(body):
    assert refused(200, body) is None
    assert refused(400, body).startswith("status 400")


def test_variables_stand_in_json_as_its_texts_do(resetter, monkeypatch):
    monkeypatch.setenv("ADMIN", 'a"b\\c')
    made, bodies = resetter(PlainTextResponse("done"))
    made.options = read_options(
        {
            "base-url": "http://h",
            "reset-url": made.options.reset_url,
            "reset-body": '{"key": "$ADMIN", "id": "${ADMIN}"}',
        }
    )
    made.run()
    assert json.loads(bodies[0]) == {"key": 'a"b\\c', "id": 'a"b\\c'}


@pytest.mark.parametrize("secret", [KEY, 'pass"word\\1', "hunter2"])
def test_what_variables_hold_is_said_in_no_error(resetter, monkeypatch, secret):
    monkeypatch.setenv("ADMIN_PASSWORD", secret)
    monkeypatch.setenv("ADMIN", secret)
    told = JSONResponse({"detail": f"no {secret}", "quoted": json.dumps(secret)}, 400)
    url = resetter(told)[0].options.reset_url
    for way in (
        {"reset_url": url + "?who=$ADMIN"},
        {"reset_url": url},
        {"reset_command": 'printf "no %s" "$ADMIN" >&2; exit 1'},
        {"reset_command": "printenv ADMIN_PASSWORD >&2; exit 1"},
    ):
        with pytest.raises(EngineError) as vain:
            resetter(told, **way)[0].run()
        assert secret not in str(vain.value)
        assert json.dumps(secret)[1:-1] not in str(vain.value)
        assert "[secret removed]" in str(vain.value)


@pytest.mark.parametrize(
    "way",
    [
        {"reset_url": "?pw=hunter2&all=1"},
        {"reset_url": "", "reset_body": '{"admin": ["hunter2"]}'},
        {"reset_url": "", "reset_body": "pw=hunter2&all=1"},
        {"reset_command": "sh -c 'echo denied: hunter2 >&2; exit 1'"},
        {"reset_command": "sh -xc 'false --key=hunter2'"},
        {"reset_command": "./hunter2/none"},
        {"reset_url": "http://admin:hunter2@127.0.0.1:9/flush?key=hunter2"},
    ],
)
def test_what_the_user_wrote_is_said_in_no_error(resetter, way):
    told = JSONResponse({"detail": "wrong password hunter2"}, 400)
    if "reset_url" in way and "://" not in way["reset_url"]:
        way = way | {"reset_url": resetter(told)[0].options.reset_url + way["reset_url"]}
    with pytest.raises(EngineError) as vain:
        resetter(told, **way)[0].run()
    assert "hunter2" not in str(vain.value)


def test_a_variable_that_no_address_can_hold_is_told_unseen(resetter, monkeypatch):
    monkeypatch.setenv("ADMIN", "hunter2\n")
    url = resetter(PlainTextResponse("done"))[0].options.reset_url
    with pytest.raises(EngineError, match="is no address with its variables put in") as vain:
        resetter(PlainTextResponse("done"), reset_url=f"{url}?key=$ADMIN")[0].run()
    assert "hunter2" not in str(vain.value)
