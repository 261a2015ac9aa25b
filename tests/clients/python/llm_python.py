"""`llm`, Simon Willison's command, with its plugin for Ollama."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from calls import KEY, MODEL, URL, call, main

FOLDER = Path(tempfile.mkdtemp(prefix="aimgpu-llm-"))
(FOLDER / "extra-openai-models.yaml").write_text(
    f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {URL}/v1\n  supports_tools: true\n  supports_schema: true\n"
)
ENVIRONMENT = os.environ | {"LLM_USER_PATH": str(FOLDER), "OLLAMA_HOST": URL, "OPENAI_API_KEY": KEY}


def _llm(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@call
def ollama_models_are_listed() -> None:
    assert f"Ollama: {MODEL}:latest" in _llm("models", "list")


@call
def ollama_prompt() -> None:
    assert _llm("-m", f"{MODEL}:latest", "-o", "num_predict", "8", "Say hello.").strip()


@call
def ollama_prompt_without_stream() -> None:
    assert _llm("-m", f"{MODEL}:latest", "-o", "num_predict", "8", "--no-stream", "Say hello.").strip()


@call
def ollama_schema() -> None:
    said = _llm("-m", f"{MODEL}:latest", "-o", "num_predict", "60", "--schema", "age int", "Somebody's age.")
    assert isinstance(json.loads(said)["age"], int)


@call
def openai_prompt() -> None:
    assert _llm("-m", "ours", "-o", "max_tokens", "8", "Say hello.").strip()


if __name__ == "__main__":
    main()
