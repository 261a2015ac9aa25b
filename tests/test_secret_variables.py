"""Secrets reach the daemon, and its environment does not show them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from aimgpu.secret_variables import pass_secrets, split_secrets

PROGRAM = """
import os, sys
from pathlib import Path
from aimgpu.secret_variables import take_secrets
take_secrets(sys.stdin.buffer, os.environ)
shown = Path("/proc/self/environ").read_bytes()
print(os.environ["HF_TOKEN"], b"hub-secret" in shown)
"""


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "OPENAI_API_KEY", "AWS_PROFILE", "AZURE_CLIENT_ID", "GOOGLE_APPLICATION_CREDENTIALS", "DB_PASSWORD"]
)
def test_what_looks_like_a_secret_is_one(name: str) -> None:
    assert split_secrets({name: "x"}) == ({}, {name: "x"})


@pytest.mark.parametrize("name", ["PATH", "HOME", "AIMGPU_HOME", "TOKENIZERS_PARALLELISM", "HF_HOME", "CUDA_VISIBLE_DEVICES"])
def test_others_are_not(name: str) -> None:
    assert split_secrets({name: "x"}) == ({name: "x"}, {})


def test_the_callers_own_key_goes_nowhere() -> None:
    assert split_secrets({"AIMGPU_API_KEY": "x"}) == ({}, {})


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")
def test_a_secret_is_passed_and_not_shown() -> None:
    plain, _ = split_secrets(os.environ)
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=plain)
    assert process.stdin is not None
    assert process.stdout is not None
    pass_secrets(process.stdin, {"HF_TOKEN": "hub-secret"})
    with process.stdout:
        assert process.stdout.read().split() == [b"hub-secret", b"False"]
    assert process.wait() == 0
