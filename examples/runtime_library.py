"""The library in one page: size models, divide a simulated GPU, schedule, limit compute, queue requests.

Run it anywhere: `python examples/runtime_library.py`. On an AMD GPU use `ROCmPartitionerReal()` and `initialize("CPX")`.
"""

from aimgpu.runtime import ComputeLimits, ModelScheduler, ModelSizingConfig, QoSManager, ResourceIsolator, ROCmPartitioner

MODELS = ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-72B-Instruct")


def main() -> None:
    """Print what each part of the library answers."""
    sizing = ModelSizingConfig()
    for model in MODELS:
        print(sizing.can_fit(model, 40.0).reason)

    partitioner = ROCmPartitioner(gpu_id=0)
    partitioner.initialize("MI300X", [40.0, 40.0, 40.0, 40.0])
    with ModelScheduler(partitioner, sizing) as scheduler:
        for model in MODELS:
            success, partition_id, reason = scheduler.schedule_model(model, priority=8)
            print(f"{model}: partition {partition_id}" if success else f"{model}: {reason}")
        for partition in scheduler.partitions():
            print(f"partition {partition.partition_id}: {partition.available_gb:.1f} of {partition.size_gb:.1f} GB available")
        print("accounting problems:", scheduler.validate() or "none")

        isolator = ResourceIsolator(partitioner)
        isolator.set_model_limit(0, MODELS[0], ComputeLimits.percent(10))
        isolator.set_model_limit(0, MODELS[1], ComputeLimits.units(30, partitioner.device()))
        for model in MODELS[:2]:
            print(isolator.environment(0, model))

    manager = QoSManager()
    manager.set_objective(MODELS[0], requests_per_second=5)
    manager.submit(MODELS[0], priority="high", payload="a prompt")
    request = manager.next()
    if request is not None:
        manager.complete(request.id, output_tokens=20)
    latency = manager.compliance(MODELS[0]).times["latency"]
    print(f"latency: mean {latency.mean:.3f} s, p99 {latency.percentiles[0.99]:.3f} s")


if __name__ == "__main__":
    main()
