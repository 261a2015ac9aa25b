"""Anthropic's Messages API: requests become OpenAI's chat, answers become messages."""

from aimgpu.gateway.dialects.anthropic.operations import OPERATIONS

__all__ = ["OPERATIONS"]
