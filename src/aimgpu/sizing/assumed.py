"""The shape assumed of a model of which only the size is known."""

from aimgpu.sizing.model import Architecture

# Dense models as published, smallest first: parameters, layers, hidden size, heads, KV heads, head size, feed-forward size.
_SHAPES = (
    (200_000_000, 30, 576, 9, 3, 64, 1536),
    (1_300_000_000, 16, 2048, 32, 8, 64, 8192),
    (4_100_000_000, 36, 2560, 32, 8, 128, 9728),
    (8_200_000_000, 36, 4096, 32, 8, 128, 14336),
    (15_000_000_000, 48, 5120, 40, 8, 128, 17408),
    (33_000_000_000, 64, 5120, 64, 8, 128, 27648),
    (75_000_000_000, 80, 8192, 64, 8, 128, 29568),
    (130_000_000_000, 88, 12288, 96, 8, 128, 28672),
    (410_000_000_000, 126, 16384, 128, 8, 128, 53248),
)
_VOCABULARY = 152_064
_CONTEXT = 131_072


def assumed_architecture(parameters: int) -> Architecture:
    """The smallest common dense shape that holds this number of parameters, so that cache and activations are large enough."""
    shape = next((shape for shape in _SHAPES if shape[0] >= parameters), _SHAPES[-1])
    _, layers, hidden, heads, kv_heads, head_dim, intermediate = shape
    return Architecture(
        family="assumed",
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        vocab_size=_VOCABULARY,
        max_context=_CONTEXT,
    )
