"""A plan for several deployments as one plan for each, so that each can be carried out and fail on its own. Pure."""

from dataclasses import replace

from aimgpu.control.planning.plan import Plan
from aimgpu.control.planning.steps import Chain, Register, Start, Step, Wake


def split_plan(plan: Plan) -> dict[str, Plan] | None:
    """By the names that it wants; None where the steps of several deployments depend on each other."""
    chains: dict[str, list[Chain]] = {deployment.name: [] for deployment in plan.wants}
    for chain in plan.chains:
        for name, part in _split_chain(chain).items():
            if name not in chains:
                return None
            chains[name].append(part)
        if len({step.deployment for step in chain}) > 1 and not all(
            isinstance(step, Start | Wake | Register) for step in chain
        ):
            return None
    return {
        deployment.name: replace(plan, chains=tuple(chains[deployment.name]), wants=(deployment,)) for deployment in plan.wants
    }


def _split_chain(chain: Chain) -> dict[str, Chain]:
    found: dict[str, list[Step]] = {}
    for step in chain:
        found.setdefault(step.deployment, []).append(step)
    return {name: tuple(steps) for name, steps in found.items()}
