"""A daemon that serves TLS: callers by its certificate, commands of this machine as always."""

import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.daemon.running import TestDaemon, apply, stack
from tests.gateway.test_tls import write_certificate

from aimgpu.cli.daemon_process import DaemonOptions
from aimgpu.home import Home


def test_callers_reach_a_daemon_by_its_certificate_and_commands_by_loopback(tmp_path: Path) -> None:
    certificate_file, key_file, _ = write_certificate(tmp_path)
    daemon = TestDaemon(tmp_path / "home")
    daemon.arguments = ("--tls-cert", str(certificate_file), "--tls-key", str(key_file))
    try:
        client = daemon.start()
        apply(client, stack(chat={}))
        status = client.read_status()
        assert status["models_url"].startswith("https://127.0.0.1:")
        assert status["page_url"].startswith("http://127.0.0.1:")
        assert client.make_link().startswith(status["page_url"])
        trusted = ssl.create_default_context(cafile=certificate_file)
        with urllib.request.urlopen(f"{status['models_url']}/models", context=trusted) as answer:
            assert b'"chat"' in answer.read()
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(f"{status['models_url']}/models", context=ssl.create_default_context())
    finally:
        daemon.stop()


def test_a_daemon_does_not_start_with_a_certificate_that_cannot_be_used(tmp_path: Path) -> None:
    certificate_file, key_file, _ = write_certificate(tmp_path)
    certificate_file.write_text("nothing")
    daemon = TestDaemon(tmp_path / "home")
    daemon.arguments = ("--tls-cert", str(certificate_file), "--tls-key", str(key_file))
    daemon.home.create()
    daemon.spawn()
    assert daemon.process is not None
    assert daemon.process.wait() == 2
    assert f"cannot serve TLS with {certificate_file}" in daemon.log.read_text()


def test_the_daemon_of_a_command_is_given_the_whole_paths() -> None:
    options = DaemonOptions(tls_cert=Path("cert.pem"), tls_key=Path("/etc/key.pem"))
    arguments = options.arguments(Home(Path("/home")))
    assert arguments[arguments.index("--tls-cert") + 1] == str(Path("cert.pem").absolute())
    assert arguments[arguments.index("--tls-key") + 1] == "/etc/key.pem"
