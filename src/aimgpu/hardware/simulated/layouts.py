"""The layouts that a simulated device can have."""

from aimgpu.domain import Layout, Partition
from aimgpu.domain.slices import EMPTY
from aimgpu.hardware.amd import modes
from aimgpu.hardware.simulated import mig
from aimgpu.hardware.simulated.products import Product

WHOLE = "whole"


class LayoutBook:
    """The legal layouts of one device, by name. For MIG it lists the full ones and finds every other legal set by its name."""

    def __init__(self, product: Product, device_id: str) -> None:
        self._product = product
        self._device_id = device_id
        self._mig_partitions: dict[tuple[str, int], Partition] = {}
        self.layouts = self._amd_layouts() if product.chip else self._whole_and_mig_layouts()
        self._by_name = {layout.name: layout for layout in self.layouts}

    @property
    def default(self) -> Layout:
        """The layout that such a GPU comes with."""
        return self.layouts[0]

    def find(self, name: str, current: Layout) -> Layout | None:
        """The layout of "CPX/NPS4", "cpx", "whole" or "1g.18gb@0+3g.71gb@4"."""
        if self._product.chip:
            return self._by_name.get(modes.layout_name(*modes.wanted_modes(name, current.memory_mode or "NPS1")))
        wanted = name.strip().lower()
        if wanted == WHOLE:
            return self._by_name[WHOLE]
        if wanted == EMPTY and self._product.mig:
            return Layout(name=EMPTY, compute_mode=None, memory_mode=None, partitions=())
        placements = mig.parse_placements(wanted, self._product.mig)
        if placements is None:
            return None
        layout = mig.mig_layout(self._device_id, placements, self._mig_partitions)
        return self._by_name.get(layout.name, layout)

    def _amd_layouts(self) -> tuple[Layout, ...]:
        chip = self._product.chip
        if chip is None:
            return ()
        predicted = (
            modes.predict_layout(self._device_id, compute, memory, chip)
            for compute in modes.compute_modes(chip.xccs)
            for memory in self._product.memory_modes
            if modes.are_compatible(compute, memory, chip.gfx_target)
        )
        return tuple(layout for layout in predicted if layout is not None)

    def _whole_and_mig_layouts(self) -> tuple[Layout, ...]:
        whole = Partition(
            id=f"{self._device_id}/{WHOLE}-0",
            device_id=self._device_id,
            index=0,
            kind=WHOLE,
            memory_bytes=self._product.memory_bytes,
            compute_units=self._product.compute_units,
        )
        unpartitioned = Layout(name=WHOLE, compute_mode=None, memory_mode=None, partitions=(whole,))
        full = (
            mig.mig_layout(self._device_id, placements, self._mig_partitions)
            for placements in mig.full_placements(self._product.mig)
        )
        return (unpartitioned, *full)
