"""Model files: GGUF, safetensors, config.json."""
