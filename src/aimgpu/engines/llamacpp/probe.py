"""The child process that dies instead of the control plane where the wheel does not fit this CPU.

Usage: python -m aimgpu.engines.llamacpp.probe [MODEL.gguf]. Prints what was proved: "imported", or "answered" with a model.
"""

import sys

import xllamacpp

from aimgpu.engines.llamacpp.server import answer_once, server_parameters


def main(arguments: list[str]) -> int:
    """Import the wheel and, given a model, compute one token."""
    xllamacpp.get_system_info()
    if not arguments:
        sys.stdout.write("imported\n")
        return 0
    settings = {
        "model_path": arguments[0],
        "alias": "probe",
        "context_tokens": 256,
        "slots": 1,
        "threads": 1,
        "parameters": {},
        "flash_attention": "auto",
        "cache_types": ["f16", "f16"],
        "sampling": {},
    }
    server = xllamacpp.Server(server_parameters(settings, "probe"))
    answer_once(server)
    sys.stdout.write("answered\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
