"""A server behind TLS: its certificate is checked, unless the operator says otherwise."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from proxy_processes import exchanges_in, http, running_proxy, running_service

from kvaudit.errors import UsageError
from kvaudit.proxy.upstream import certificates, upstream_url

BODY = {"model": "m", "messages": []}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", "key.pem", "-out", "certificate.pem", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return folder / "certificate.pem"


@pytest.fixture(scope="module")
def upstream(certificate: Path) -> Iterator[str]:
    with running_service(certificate, certificate.with_name("key.pem")) as address:
        yield f"https://{address}"


@pytest.mark.parametrize("option", ["ca", "insecure"])
def test_a_server_whose_certificate_is_accepted_is_recorded(
    upstream: str, certificate: Path, tmp_path: Path, option: str
) -> None:
    options = ["--ca", str(certificate)] if option == "ca" else ["--insecure"]
    capture = tmp_path / "capture.jsonl"
    with running_proxy(upstream, capture, *options) as proxy:
        answer = http().post(f"{proxy.url}/v1/chat/completions", json=BODY)
        assert proxy.stop() == 0

    assert answer.status_code == 200
    assert exchanges_in(capture)[0]["outcome"] == "complete"


def test_a_server_whose_certificate_nobody_signed_is_not_talked_to(upstream: str, tmp_path: Path) -> None:
    with running_proxy(upstream, tmp_path / "capture.jsonl") as proxy:
        answer = http().post(f"{proxy.url}/v1/chat/completions", json=BODY)

    assert answer.status_code == 502
    assert "certificate" in answer.json()["error"]["message"].lower()


def test_a_file_without_certificates_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ours.pem").write_text("nothing")

    for path in (tmp_path / "ours.pem", tmp_path / "missing.pem"):
        with pytest.raises(UsageError, match="holds no certificates"):
            certificates(insecure=False, authority=path)
    with pytest.raises(UsageError, match="--insecure"):
        certificates(insecure=True, authority=tmp_path / "ours.pem")


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://x", "http://", "http://user:password@x", "http://x?y=1", "ws://x"],
)
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        upstream_url(url)
    assert "password@" not in str(refused.value)
