"""OpenAI's Responses API. Conversations are kept here, so that they work with every engine.

vLLM gets requests as they are, with earlier turns written out. For others they become chats: llama.cpp's own events carry
neither `output_index` nor `sequence_number`, which OpenAI's clients need, and Ollama's keep no conversation.
"""

from aimgpu.gateway.dialects.responses.operations import OPERATIONS

__all__ = ["OPERATIONS"]
