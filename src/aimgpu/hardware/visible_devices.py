"""The variables by which a process sees its GPUs, joined for a process that was granted several."""

from collections.abc import Mapping

_CU_MASK = "HSA_CU_MASK"  # "INDEX:UNITS"; the index counts the visible devices
_LISTS = {  # one entry per visible device, and what stands between two
    "ROCR_VISIBLE_DEVICES": ",",
    "HIP_VISIBLE_DEVICES": ",",
    "CUDA_VISIBLE_DEVICES": ",",
    "NVIDIA_VISIBLE_DEVICES": ",",
    _CU_MASK: ";",
}


def join_environment(environment: dict[str, str], more: Mapping[str, str]) -> None:
    """Add what another partition needs: an instance on several GPUs sees all of them."""
    for name, value in more.items():
        before = environment.get(name, value)
        environment[name] = f"{before}{_LISTS[name]}{value}" if name in _LISTS and before != value else value


def at_position(environment: Mapping[str, str], position: int) -> Mapping[str, str]:
    """A mask is made for the only visible device; among several it names its own."""
    if _CU_MASK not in environment:
        return environment
    return {**environment, _CU_MASK: f"{position}:{environment[_CU_MASK].partition(':')[2]}"}
