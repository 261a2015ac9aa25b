"""GPUs for the fake library: their figures, and what is on them now."""

import itertools
from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(frozen=True)
class MigProfile:
    number: int  # NVML's constant
    id: int
    kind: str
    slices: int
    most: int
    multiprocessors: int
    memory_mb: int
    starts: tuple[int, ...]
    size: int


@dataclass(eq=False)
class FakeComputeInstance:
    id: int
    slices: int


@dataclass(eq=False)
class FakeInstance:
    id: int
    profile: MigProfile
    start: int
    computes: list[FakeComputeInstance] = field(default_factory=list)

    def add_compute(self, slices: int) -> FakeComputeInstance:
        number = next(n for n in itertools.count() if n not in {one.id for one in self.computes})
        self.computes.append(FakeComputeInstance(id=number, slices=slices))
        return self.computes[-1]


@dataclass
class FakeProcess:
    pid: int
    memory_bytes: int | None
    kind: str = "compute"  # "graphics", "mps"
    instance: int | None = None


@dataclass(eq=False)
class FakeGpu:
    name: str
    uuid: str
    total_bytes: int
    reserved_bytes: int = 500 * MIB
    minor: int = 0
    bus_id: str = "00000000:65:00.0"
    cores: int | None = 16896
    capability: tuple[int, int] = (9, 0)
    compute_mode: int = 0
    utilization: int | None = 7
    profiles: tuple[MigProfile, ...] = ()
    mig_on: bool = False
    mig_pending: bool | None = None
    mode_needs_reset: bool = False  # A100: MIG mode waits for a reset when something holds the GPU
    tells_profiles: bool = True  # also while MIG is off
    tells_placements_when_off: bool = False
    lost: bool = False
    remapped: tuple[int, int, int, int] | None = (0, 0, 0, 0)  # None: its memory has no such rows
    instances: list[FakeInstance] = field(default_factory=list)
    processes: list[FakeProcess] = field(default_factory=list)

    def fits(self, profile: MigProfile, start: int) -> bool:
        taken = {s for one in self.instances for s in range(one.start, one.start + one.profile.size)}
        return (
            not taken & set(range(start, start + profile.size))
            and sum(one.profile.slices for one in self.instances) + profile.slices <= max(p.slices for p in self.profiles)
            and sum(one.profile.id == profile.id for one in self.instances) < profile.most
        )

    def add(self, profile: MigProfile, start: int) -> FakeInstance:
        number = next(n for n in itertools.count(1) if n not in {one.id for one in self.instances})
        self.instances.append(FakeInstance(id=number, profile=profile, start=start))
        return self.instances[-1]

    def uses(self, instance: FakeInstance) -> bool:
        return any(process.instance == instance.id for process in self.processes)

    def used_by(self, instance: FakeInstance | None) -> int:
        return sum(
            process.memory_bytes or 0 for process in self.processes if instance is None or process.instance == instance.id
        )

    def make(self, kind: str, start: int) -> FakeInstance:
        """An instance that someone made before, with one full compute instance."""
        profile = next(one for one in self.profiles if one.kind == kind)
        instance = self.add(profile, start)
        instance.add_compute(profile.slices)
        return instance


def mig_profiles(
    gigabytes: tuple[int, int, int, int], mebibytes: tuple[int, int, int, int], units: tuple[int, int, int, int, int, int]
) -> tuple[MigProfile, ...]:
    """Profiles of A100, H100 and H200; ids and places as `nvidia-smi mig -lgip` and `-lgipp` print them there."""
    (a, b, c, d), (e, f, g, h), every = gigabytes, mebibytes, tuple(range(7))
    return (
        MigProfile(0, 19, f"1g.{a}gb", 1, 7, units[0], e, every, 1),
        MigProfile(1, 14, f"2g.{b}gb", 2, 3, units[2], f, (0, 2, 4), 2),
        MigProfile(2, 9, f"3g.{c}gb", 3, 2, units[3], g, (0, 4), 4),
        MigProfile(3, 5, f"4g.{c}gb", 4, 1, units[4], g, (0,), 4),
        MigProfile(4, 0, f"7g.{d}gb", 7, 1, units[5], h, (0,), 8),
        MigProfile(7, 20, f"1g.{a}gb+me", 1, 1, units[0], e, every, 1),
        MigProfile(9, 15, f"1g.{b}gb", 1, 4, units[1], f, (0, 2, 4, 6), 2),
    )


def h200(number: int = 0, **changes: object) -> FakeGpu:
    return _gpu(
        FakeGpu(
            name="NVIDIA H200",
            uuid=_uuid(number),
            total_bytes=143771 * MIB,
            reserved_bytes=644939776,
            minor=number,
            profiles=mig_profiles((18, 35, 71, 141), (16384, 33280, 71424, 143360), (16, 26, 32, 60, 64, 132)),
        ),
        changes,
    )


def h100(number: int = 0, **changes: object) -> FakeGpu:
    return _gpu(
        FakeGpu(
            name="NVIDIA H100 80GB HBM3",
            uuid=_uuid(number),
            total_bytes=81559 * MIB,
            reserved_bytes=300 * MIB,
            minor=number,
            profiles=mig_profiles((10, 20, 40, 80), (9984, 20096, 40448, 81152), (16, 26, 32, 60, 64, 132)),
        ),
        changes,
    )


def a100(number: int = 0, **changes: object) -> FakeGpu:
    return _gpu(
        FakeGpu(
            name="NVIDIA A100-SXM4-40GB",
            uuid=_uuid(number),
            total_bytes=40960 * MIB,
            reserved_bytes=600 * MIB,
            minor=number,
            cores=6912,
            capability=(8, 0),
            profiles=mig_profiles((5, 10, 20, 40), (4864, 9856, 19968, 40192), (14, 14, 28, 42, 56, 98)),
        ),
        changes,
    )


def l4(number: int = 0, **changes: object) -> FakeGpu:
    """A GPU without MIG."""
    return _gpu(
        FakeGpu(name="NVIDIA L4", uuid=_uuid(number), total_bytes=23034 * MIB, minor=number, cores=7424, capability=(8, 9)),
        changes,
    )


def _gpu(gpu: FakeGpu, changes: dict[str, object]) -> FakeGpu:
    for name, value in changes.items():
        assert hasattr(gpu, name), name
        setattr(gpu, name, value)
    return gpu


def _uuid(number: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{number + 1:012d}"
