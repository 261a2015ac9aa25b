"""Ollama's API under /api: requests become OpenAI's, answers become Ollama's."""

from aimgpu.gateway.dialects.ollama.operations import OPERATIONS

__all__ = ["OPERATIONS"]
