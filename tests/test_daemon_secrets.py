"""Secrets on the way to the daemon: every value arrives, what was not passed by us changes nothing."""

import io
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from aimgpu.secret_variables import pass_secrets, split_secrets, take_secrets

names = st.from_regex(r"\A[A-Z_][A-Z0-9_]{0,20}\Z")
# What an environment can hold: any bytes but NUL, shown as surrogates where they are no UTF-8.
values = st.binary(max_size=20).map(lambda raw: os.fsdecode(raw.replace(b"\0", b"")))
environments = st.dictionaries(names, values, max_size=8)


class Kept(io.BytesIO):
    """Can be looked at after it was closed."""

    content = b""

    def close(self) -> None:
        self.content = self.getvalue()
        super().close()


@settings(max_examples=examples(30))
@given(environments)
def test_an_environment_is_divided_and_nothing_is_lost_but_the_callers_own_key(environment: dict[str, str]) -> None:
    plain, secret = split_secrets(environment)
    assert not plain.keys() & secret.keys()
    kept = {name: value for name, value in environment.items() if name != "AIMGPU_API_KEY"}
    assert plain | secret == kept


@settings(max_examples=examples(30))
@given(environments)
def test_what_is_passed_arrives_as_it_was(secrets: dict[str, str]) -> None:
    stream = Kept()
    pass_secrets(stream, secrets)
    found: dict[str, str] = {"HERE": "before"}
    take_secrets(io.BytesIO(stream.content), found)
    assert found == {"HERE": "before"} | secrets


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"5", b"\xff", b'"x"', b"[" * 10_000])
def test_what_no_command_passed_changes_nothing(text: bytes) -> None:
    """The daemon may be started by hand, with anything on its standard input."""
    found = {"HERE": "before"}
    take_secrets(io.BytesIO(text), found)
    assert found == {"HERE": "before"}


def test_values_that_are_no_text_become_text() -> None:
    found: dict[str, str] = {}
    take_secrets(io.BytesIO(json.dumps({"A_TOKEN": 5, "B_TOKEN": None}).encode()), found)
    assert found == {"A_TOKEN": "5", "B_TOKEN": "None"}


def test_a_daemon_that_ended_at_once_is_no_error_of_the_command() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as stream:
        pass_secrets(stream, {"HF_TOKEN": "x" * 100_000})
        assert stream.closed


@pytest.mark.parametrize(
    "name",
    [
        "GITHUB_TOKEN",
        "TOKEN",
        "MY_SECRETS",
        "DB_PASSWD",
        "SSH_PASSPHRASE",
        "APIKEY",
        "X_API_KEY",
        "S3_ACCESS_KEY",
        "CREDENTIAL",
    ],
)
def test_names_of_secrets_are_known_wherever_the_word_stands(name: str) -> None:
    assert split_secrets({name: "x", f"{name}_OLD": "x"}) == ({}, {name: "x", f"{name}_OLD": "x"})


@pytest.mark.parametrize(
    "name", ["TOKENS_PER_SECOND", "KEYBOARD", "PASSWORDLESS", "MONKEY", "HSA_CU_MASK", "VLLM_LOGGING_LEVEL"]
)
def test_a_word_that_only_begins_like_a_secret_is_none(name: str) -> None:
    assert split_secrets({name: "x"}) == ({name: "x"}, {})
