"""How hard low work is held back on a device because something more important there breaks its promises."""

from dataclasses import dataclass

_BURNING, _CALM = 1.0, 0.5
_SHED_BURN = 12.0  # more than half of what was promised with a p95 is broken, and slowing low work did not help
_LEAST_SHARE = 0.25
_GIVEN_BACK = 0.1  # of the slots, in each calm second


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """`low_share`: the part of each engine's slots that low work may use; `shed`: refuse new low work that would wait."""

    low_share: float = 1.0
    shed: bool = False
    reason: str | None = None  # a sentence for people, while there is pressure


NO_PRESSURE = Pressure()


def adjust_pressure(before: Pressure, model: str | None, burn: float) -> Pressure:
    """One step, taken about once a second: halve quickly while `model` burns its budget, give back slowly when it is calm.

    `model` is the high model with the worst fast burn on the device (None: there is none).
    """
    if model is not None and burn > _BURNING:
        share = max(before.low_share / 2, _LEAST_SHARE)
        shed = burn >= _SHED_BURN and share <= _LEAST_SHARE
        action = f"held to {share:.0%} of the slots" + (", what finds none free is refused" if shed else "")
        return Pressure(low_share=share, shed=shed, reason=f"{model} burns its error budget {burn:.1f}x: low work is {action}")
    share = before.low_share if burn >= _CALM else min(round(before.low_share + _GIVEN_BACK, 3), 1.0)
    if share >= 1:
        return NO_PRESSURE
    reason = f"low work is held to {share:.0%} of the slots, and gets them back while promises are kept"
    return Pressure(low_share=share, shed=False, reason=reason)
