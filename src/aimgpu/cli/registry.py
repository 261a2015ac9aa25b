"""Every command, by section: where it lives and the line that `aimgpu --help` shows.

Nothing here is imported before its command is called, so `--help` stays fast. To add a command, add a line to a section;
the attribute must be a click command that takes `--json` (`output.json_option`) and has examples (`output.examples`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """A command by the module that has it."""

    target: str  # "module:attribute"
    help: str


SECTIONS: dict[str, dict[str, Entry]] = {
    "Serve models": {
        "up": Entry("aimgpu.cli.commands.serve.up:up", "Serve the models of a stack file behind one OpenAI endpoint."),
        "run": Entry("aimgpu.cli.commands.serve.run:run", "Talk to a model; start it first where it does not run."),
        "exec": Entry("aimgpu.cli.commands.serve.exec:exec_command", "Run any program in a share of a GPU."),
        "pull": Entry("aimgpu.cli.commands.serve.pull:pull", "Bring models onto this machine before they are served."),
        "down": Entry("aimgpu.cli.commands.serve.down:down", "Stop models and give back what they held."),
        "ps": Entry("aimgpu.cli.commands.serve.ps:ps", "The models that run: where, with how much memory, in what state."),
        "resize": Entry("aimgpu.cli.commands.serve.resize:resize", "Change the memory that a running model may hold."),
        "chat": Entry("aimgpu.cli.commands.serve.chat:chat", "Talk to a model in the terminal."),
        "logs": Entry("aimgpu.cli.commands.serve.logs:logs", "What a model's engine printed."),
        "compose": Entry(
            "aimgpu.cli.commands.serve.compose:compose", "Print a compose file for a stack, with memory that adds up."
        ),
        "doctor": Entry(
            "aimgpu.cli.commands.machine.doctor:doctor", "What was found on this machine, and what to do about what is missing."
        ),
        "demo": Entry("aimgpu.cli.commands.machine.demo:demo", "See limits hold in a minute, without a GPU or on one."),
        "keys": Entry("aimgpu.cli.commands.serve.keys:keys", "API keys for callers from other machines."),
    },
    "Look at GPUs": {
        "gpus": Entry(
            "aimgpu.cli.commands.machine.gpus:gpus", "The GPUs of this machine: layout, memory granted, measured and free."
        ),
        "partition": Entry(
            "aimgpu.cli.commands.machine.partition:partition", "Divide a GPU into partitions that the hardware enforces."
        ),
    },
    "Size models": {
        "size": Entry("aimgpu.cli.commands.sizing.size:size", "What a model needs, term by term, and where it fits."),
        "catalogue": Entry(
            "aimgpu.cli.commands.sizing.catalogue:catalogue", "The models that are known by name; add your own."
        ),
        "measurements": Entry(
            "aimgpu.cli.commands.sizing.measurements:measurements", "What models were measured to take; forget it."
        ),
        "profiles": Entry(
            "aimgpu.cli.commands.sizing.profiles:profiles", "AIM profiles: what each model needs of a GPU, as files."
        ),
    },
    "Decide": {
        "plan": Entry("aimgpu.cli.commands.planning.plan:plan", "What a stack would get, and what would first have to change."),
        "explain": Entry(
            "aimgpu.cli.commands.planning.explain:explain_command", "Why a model is, or would be, where it is; or nowhere."
        ),
        "capacity": Entry(
            "aimgpu.cli.commands.planning.capacity:capacity", "How many GPUs a stack needs, and proof of how close that is."
        ),
        "snapshot": Entry("aimgpu.cli.commands.planning.snapshot:snapshot", "Everything a decision looks at, as one file."),
    },
    "Kubernetes": {
        "k8s": Entry("aimgpu.cli.commands.cluster.k8s:k8s", "One model or the web chat on a Kubernetes cluster."),
        "timeslicing": Entry(
            "aimgpu.cli.commands.cluster.timeslicing:timeslicing",
            "Time-sliced GPUs of a cluster: how many replicas, set up, verify, find faults.",
        ),
    },
    "Watch": {
        "top": Entry("aimgpu.cli.commands.watch.top:top", "Requests, queues, latencies and GPUs, live."),
        "web": Entry("aimgpu.cli.commands.watch.web:web", "A one-time link to the page; the page of a cluster."),
        "slo": Entry(
            "aimgpu.cli.commands.watch.slo:slo", "What was promised and what was kept: attainment, error budget, burn."
        ),
        "exporter": Entry(
            "aimgpu.cli.commands.machine.exporter:exporter", "Serve this machine's metrics for Prometheus, without a daemon."
        ),
    },
    "This command": {
        "completion": Entry("aimgpu.cli.completion:completion", "Print the completion script of a shell."),
        "version": Entry("aimgpu.cli.commands.machine.version:version", "Say which version this is."),
    },
}


def find_entry(name: str) -> Entry | None:
    """None for a word that is not a command."""
    return next((entries[name] for entries in SECTIONS.values() if name in entries), None)


def command_names() -> list[str]:
    """In the order of the help."""
    return [name for entries in SECTIONS.values() for name in entries]
