import orjson
import pytest

from kvaudit.engines.server.jsons import parsed


@pytest.mark.parametrize("data", [b'{"text": "\\ud83d"', b"{broken", b"", b"\xff"])
def test_what_is_no_json_is_said_in_one_way_also_where_a_letter_is_cut(data):
    with pytest.raises(orjson.JSONDecodeError):
        parsed(data)


def test_half_a_letter_is_read():
    assert parsed(b'{"text": "a\\ud83d"}') == {"text": "a?"}
