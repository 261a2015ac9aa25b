"""Every example of the runtime document, with only the import changed: the names live in `aimgpu.runtime`."""

import runpy
from pathlib import Path

import pytest

from aimgpu import runtime
from aimgpu.hardware.simulated import SimulatedHardware
from aimgpu.runtime import ModelScheduler, ModelSizingConfig, ModelStatus, ROCmPartitioner

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMED = (
    "ModelSizingConfig ModelSizeInfo ROCmPartitioner ROCmPartitionerReal ComputePartitionMode MemoryPartitionMode "
    "MemoryPartition ModelScheduler ModelInstance ModelStatus ResourceIsolator ComputeLimits QoSManager"
)


def test_every_class_of_the_document_is_there() -> None:
    assert set(NAMED.split()) <= set(runtime.__all__)


def test_the_basic_example() -> None:
    # Initialize partitioner
    partitioner = ROCmPartitioner(gpu_id=0)
    partitioner.initialize("MI300X", [40.0, 40.0, 40.0, 40.0])

    # Create scheduler
    scheduler = ModelScheduler(partitioner)

    # Schedule a model
    success, partition_id, error = scheduler.schedule_model("meta-llama/Llama-3.1-8B-Instruct")

    assert (success, error) == (True, None)
    assert partition_id in range(4)
    assert scheduler.get_model_status("meta-llama/Llama-3.1-8B-Instruct") is ModelStatus.SCHEDULED


def test_the_example_of_the_sizing_file(tmp_path: Path) -> None:
    """8.03B parameters at 2 bytes are 16.06 GB: the 16.0 that is entered is taken as the weights, never as less."""
    path = tmp_path / "model_sizing_config.yaml"
    path.write_text(
        """
models:
  "meta-llama/Llama-3.1-8B-Instruct":
    model_id: "meta-llama/Llama-3.1-8B-Instruct"
    parameters: "8B"
    memory_gb: 16.0
    quantization: ["fp16", "int8", "int4"]
    recommended_partition_gb: 20.0
"""
    )
    size = ModelSizingConfig(path).get_model_size("meta-llama/Llama-3.1-8B-Instruct")
    assert 16.0 <= size.memory_gb < 16.1
    assert size.recommended_partition_gb == 20.0


@pytest.mark.parametrize("product", ["MI300X", "MI325X", "MI350X", "MI355X", "MI350P"])
def test_every_gpu_of_the_document_is_known(product: str) -> None:
    """Their memory and units are those of the data sheets, which the document's own table does not always have."""
    device = SimulatedHardware([(product, 1)]).read_devices()[0]
    assert device.compute_units in {128, 256, 304}
    assert ROCmPartitioner().initialize(product, [40.0, 40.0])


def test_the_modes_of_the_document_are_there() -> None:
    assert {"SPX", "CPX", "TPX"} <= set(runtime.ComputePartitionMode)
    assert {"NPS1", "NPS4"} <= set(runtime.MemoryPartitionMode)


def test_the_usage_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "runtime_library.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "partition 0" in shown
    assert "HSA_CU_MASK" in shown
    assert "p99" in shown
