"""Which tests are fast: `make quick` runs those, `make test` runs all.

A test is slow when it starts processes, builds programs or needs more than a moment. Whole folders are slow by default; the
fast ones are listed here, with the modules in them that are slow all the same. One test is marked with `pytest.mark.slow`.
"""

from pathlib import Path

FAST_FOLDERS = ("domain", "qos", "placement", "sizing", "ledger", "hardware", "control", "isolation", "runtime", "monitoring")
FAST_MODULES = (
    "test_architecture.py",
    "test_daemon_secrets.py",
    "test_errors.py",
    "test_file_faults.py",
    "test_files.py",
    "test_home_faults.py",
    "test_keyfile.py",
    "test_logs.py",
    "test_quantities.py",
    "test_units.py",
)
SLOW_MODULES = (
    "control/test_accounting.py",
    "control/test_foreign_placement.py",
    "control/test_side_by_side.py",
    "control/test_step_faults.py",
    "control/test_vanishing.py",
    "hardware/test_amd_change_walks.py",
    "hardware/test_amd_command_line.py",
    "hardware/test_amd_held_files.py",
    "hardware/test_amd_polling.py",
    "hardware/test_amd_tools.py",
    "hardware/test_product_tables.py",
    "hardware/test_simulated_state.py",
    "isolation/test_broken_regions.py",
    "isolation/test_control_groups.py",
    "ledger/test_damaged_files.py",
    "monitoring/test_dashboards.py",
    "monitoring/test_grafana_types.py",
    "monitoring/test_prometheus.py",
    "monitoring/test_standalone.py",
    "monitoring/test_traces.py",
    "placement/test_capacity.py",
    "placement/test_cli.py",
    "placement/test_explanations.py",
    "placement/test_invariants.py",
    "placement/test_layout_changes.py",
    "placement/test_plans.py",
    "placement/test_properties.py",
    "placement/test_remedies.py",
    "placement/test_snapshot_damage.py",
    "qos/test_replay.py",
    "qos/test_sharing.py",
    "qos/test_sharing_measured.py",
    "sizing/test_commands.py",
    "sizing/test_every_byte.py",
    "sizing/test_hostile_commands.py",
    "sizing/test_llamacpp_truth.py",
    "sizing/test_monotonicity.py",
    "sizing/test_profiles.py",
    "sizing/test_rows_and_texts.py",
    "sizing/test_same_footprint.py",
    "sizing/test_several_devices.py",
)
# What takes longest: these files run first, in this order. Some may have to build a program first, Kubernetes above all.
LONGEST_MODULES = (
    "kubernetes/test_dra_sharing.py",
    "daemon/test_daemon.py",
    "daemon/test_held.py",
    "daemon/test_kill.py",
    "daemon/test_stress.py",
    "kubernetes/test_nvidia_plugin.py",
    "clients/test_ollama_command.py",
    "hardware/test_amd_tools.py",
    "cli/test_main_job.py",
    "web/test_browser.py",
    "kubernetes/test_chart.py",
    "kubernetes/test_kserve_cluster.py",
    "kubernetes/test_dra_failures.py",
    "clients/test_clients.py",
    "native/test_process_turn.py",
    "kubernetes/test_dra_isolation.py",
    "kubernetes/test_timeslicing_cluster.py",
    "kubernetes/test_device_plugin_cluster.py",
    "kubernetes/test_operator_cluster.py",
    "kubernetes/test_kai_cluster.py",
    "kubernetes/test_admission_cluster.py",
    "kubernetes/test_node_agent.py",
    "cluster/test_cluster.py",
    "cli/test_up.py",
    "native/test_long_launches.py",
    "cli/test_commands.py",
    "engines/test_image_pulls.py",
    "control/test_stress.py",
    "daemon/test_partition_kill.py",
)
# Where the programs of these files are not built yet, they are in the background meanwhile: the files run last.
LAST_MODULES = ("kubernetes/test_kserve_cluster.py", "kubernetes/test_kai_cluster.py")
_ROOT = Path(__file__).parent


def is_slow(path: Path) -> bool:
    """Whether the tests of this module belong to the slow tier."""
    inside = path.relative_to(_ROOT)
    if len(inside.parts) == 1:
        return inside.name not in FAST_MODULES
    return inside.parts[0] not in FAST_FOLDERS or str(inside) in SLOW_MODULES


def rank(path: Path, *, built: bool) -> int:
    """The place of a module in a run of all: the longest first, all others after them as they were, but for the last.

    `built`: whether there is nothing to build for the last ones. Alone at the end they would leave all workers but one idle.
    """
    name = str(path.relative_to(_ROOT))
    if name in LAST_MODULES and not built:
        return len(LONGEST_MODULES) + 1
    return LONGEST_MODULES.index(name) if name in LONGEST_MODULES else len(LONGEST_MODULES)


if __name__ == "__main__":  # for the Makefile: what the fast tier collects
    print(*(f"tests/{name}" for name in (*FAST_FOLDERS, *FAST_MODULES)))  # noqa: T201
