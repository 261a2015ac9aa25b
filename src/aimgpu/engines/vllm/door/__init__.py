"""The folder that vLLM's Python gets on its path: `aimgpu_vllm_door` alone, which imports nothing of ours."""

from pathlib import Path

MODULE = "aimgpu_vllm_door"
FOLDER = Path(__file__).parent
ARGUMENTS = ("--middleware", f"{MODULE}.AskKey")


def read_module() -> str:
    """Its text, for a place that has no files of ours."""
    return (FOLDER / f"{MODULE}.py").read_text(encoding="utf-8")
