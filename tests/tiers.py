"""Which tests run when, by file: the tables below. A test that uses the fixture ``cluster`` is of the tier rest by itself.

| tier | command | what |
| --- | --- | --- |
| fast | `make quick` | starts no process and needs no more than a moment |
| test | `make test` | with the fast ones; all that the tables do not name |
| rest | `make test-rest` | a cluster, programs to build first, stress, sanitizers; property tests again, at full length |
| wide | `make test-wide` | real engines: gigabytes to install, minutes to start |

One test of a file is moved with ``pytest.mark.slow`` (not fast) or ``pytest.mark.rest``.
"""

from enum import IntEnum
from pathlib import Path


class Tier(IntEnum):
    FAST = 1
    TEST = 2
    REST = 3
    WIDE = 4


FAST, TEST, REST, WIDE = Tier
FOLDERS = dict.fromkeys(
    ("domain", "qos", "placement", "sizing", "ledger", "hardware", "control", "isolation", "runtime", "monitoring"),
    FAST,
) | {"cluster": REST, "engines_real": WIDE}
MODULES = {
    "kubernetes/test_placement_rules.py": FAST,
    "kubernetes/test_placement_writes.py": FAST,
    "test_architecture.py": FAST,
    "test_daemon_secrets.py": FAST,
    "test_errors.py": FAST,
    "test_file_faults.py": FAST,
    "test_files.py": FAST,
    "test_home_faults.py": FAST,
    "test_keyfile.py": FAST,
    "test_logs.py": FAST,
    "test_quantities.py": FAST,
    "test_units.py": FAST,
    # In fast folders.
    "control/test_accounting.py": TEST,
    "control/test_foreign_placement.py": TEST,
    "control/test_side_by_side.py": TEST,
    "control/test_step_faults.py": TEST,
    "control/test_vanishing.py": TEST,
    "hardware/test_amd_change_walks.py": TEST,
    "hardware/test_amd_command_line.py": TEST,
    "hardware/test_amd_held_files.py": TEST,
    "hardware/test_amd_polling.py": TEST,
    "hardware/test_amd_tools.py": TEST,
    "hardware/test_product_tables.py": TEST,
    "hardware/test_simulated_state.py": TEST,
    "isolation/test_broken_regions.py": TEST,
    "isolation/test_control_groups.py": TEST,
    "ledger/test_damaged_files.py": TEST,
    "monitoring/test_dashboards.py": TEST,
    "monitoring/test_grafana_types.py": TEST,
    "monitoring/test_prometheus.py": TEST,
    "monitoring/test_standalone.py": TEST,
    "monitoring/test_traces.py": TEST,
    "placement/test_capacity.py": TEST,
    "placement/test_cli.py": TEST,
    "placement/test_explanations.py": TEST,
    "placement/test_invariants.py": TEST,
    "placement/test_layout_changes.py": TEST,
    "placement/test_plans.py": TEST,
    "placement/test_properties.py": TEST,
    "placement/test_remedies.py": TEST,
    "placement/test_residency.py": TEST,
    "placement/test_residency_replay.py": TEST,
    "placement/test_snapshot_damage.py": TEST,
    "qos/test_replay.py": TEST,
    "qos/test_sharing.py": TEST,
    "qos/test_sharing_measured.py": TEST,
    "sizing/test_commands.py": TEST,
    "sizing/test_every_byte.py": TEST,
    "sizing/test_hostile_commands.py": TEST,
    "sizing/test_llamacpp_truth.py": TEST,
    "sizing/test_monotonicity.py": TEST,
    "sizing/test_profiles.py": TEST,
    "sizing/test_rows_and_texts.py": TEST,
    "sizing/test_same_footprint.py": TEST,
    "sizing/test_several_devices.py": TEST,
    # Built or downloaded first, for minutes.
    "clients/test_ollama_command.py": REST,
    "kubernetes/test_kai_cluster.py": REST,
    "kubernetes/test_kserve_cluster.py": REST,
    "kubernetes/test_nvidia_plugin.py": REST,
    "kubernetes/test_nvidia_plugin_mig.py": REST,
    # Stress: the same over and over.
    "control/test_stress.py": REST,
    "daemon/test_stress.py": REST,
    "native/test_noise.py": REST,
    "native/test_random_memory.py": REST,
    # Every order of steps.
    "native/test_region_model.py": REST,
    "native/test_region_steps.py": REST,
    # Emulated processors.
    "native/test_arm64.py": REST,
}
# What takes longest: these files run first, in this order, so that the workers end together.
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


def tier_of(path: Path) -> Tier:
    """The earliest tier that runs this module."""
    inside = path.relative_to(_ROOT)
    return MODULES.get(str(inside)) or FOLDERS.get(inside.parts[0]) or TEST


def rank(path: Path, *, built: bool) -> int:
    """The place of a module in a run: the longest first, all others after them as they were, but for the last.

    `built`: whether there is nothing to build for the last ones. Alone at the end they would leave all workers but one idle.
    """
    name = str(path.relative_to(_ROOT))
    if name in LAST_MODULES and not built:
        return len(LONGEST_MODULES) + 1
    return LONGEST_MODULES.index(name) if name in LONGEST_MODULES else len(LONGEST_MODULES)
