"""Servers that need no `command` in the stack file: `engine: NAME` is `engine: command` with what stands here.

`tests/engines_real/test_package_flags.py` compares the flags with the newest packages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A command with its placeholders. Each server answers `/health`, and is asked at `/v1/models` how it calls its models."""

    command: str
    install: str  # what to do where the program is missing
    ready_seconds: int
    key_variable: str | None = None  # from which it reads the key; None: from the command line, or it checks no key

    @property
    def argv(self) -> tuple[str, ...]:
        """Word by word; no word has a space."""
        return tuple(self.command.split())

    def fixed_flags(self) -> frozenset[str]:
        """Flags that a user cannot give again, without dashes: they hold what the gateway relies on."""
        return frozenset(word.lstrip("-") for word in self.argv if word.startswith("-")) - {"mem-fraction-static"}


_WHERE = "--host {host} --port {port}"
PRESETS: Mapping[str, Preset] = {
    "infinity": Preset(
        command=f"infinity_emb v2 --model-id {{model}} {_WHERE} --url-prefix /v1",
        install="pip install 'infinity-emb[all]'",
        ready_seconds=600,
        key_variable="INFINITY_API_KEY",
    ),
    "lmdeploy": Preset(
        command="lmdeploy serve api_server {model} --server-name {host} --server-port {port} --api-keys {key}",
        install="pip install lmdeploy",
        ready_seconds=1200,
    ),
    "sglang": Preset(
        command=f"sglang serve --model-path {{model}} {_WHERE} --api-key {{key}} --mem-fraction-static {{memory_fraction}}",
        install="pip install sglang",
        ready_seconds=1200,
    ),
    "tei": Preset(
        command="text-embeddings-router --model-id {model} --hostname {host} --port {port}",
        install="cargo install --path router (https://github.com/huggingface/text-embeddings-inference)",
        ready_seconds=600,
        key_variable="API_KEY",
    ),
    "whisper.cpp": Preset(
        command=f"whisper-server --model {{model}} {_WHERE} --inference-path /v1/audio/transcriptions",
        install="cmake -B build && cmake --build build (https://github.com/ggml-org/whisper.cpp)",
        ready_seconds=300,
    ),
}


def find_preset(program: str) -> Preset | None:
    """The one whose program this is, wherever it is installed."""
    name = PurePath(program).name
    return next((preset for preset in PRESETS.values() if preset.argv[0] == name), None)
