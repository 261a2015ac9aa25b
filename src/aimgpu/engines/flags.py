"""Engine flags as a footprint carries them."""

from collections.abc import Mapping


def normalise_flags(flags: Mapping[str, str]) -> dict[str, str]:
    """`--max_num_seqs`, `max-num-seqs` and `max_num_seqs` are one flag: "max-num-seqs"."""
    return {name.lstrip("-").replace("_", "-"): value for name, value in flags.items()}


def as_arguments(flags: Mapping[str, str]) -> tuple[str, ...]:
    """In the order of their names, `--name value ...`; with "" or "true" a flag stands alone, "false" leaves it out."""
    arguments: list[str] = []
    for name, value in sorted(normalise_flags(flags).items()):
        if value == "false":
            continue
        arguments.append(f"--{name}")
        if value not in ("", "true"):
            arguments.extend(value.split())
    return tuple(arguments)
