"""Calls every wrapped function the way programs do. It stops with `NAME start`, `NAME held`, `NAME freed`.

Run with one argument, `cuda` or `hip`. The test that started it compares the region with the driver at every stop.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from itertools import chain

KIB, MIB = 1 << 10, 1 << 20
SIZE = 3 * MIB + 512
NONE = ctypes.c_void_p(None)
Case = Callable[[ctypes.CDLL], Iterator[str]]


def size(count: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(count)


def check(code: int) -> None:
    if code != 0:
        raise SystemExit(f"code {code}")


def plain(
    allocate: str, release: str, *arguments: object, pointer: type = ctypes.c_uint64, tail: tuple[object, ...] = ()
) -> Case:
    """Allocate into a pointer, stop, release."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        got = pointer()
        check(lib[allocate](ctypes.byref(got), *arguments))
        yield "held"
        check(lib[release](ctypes.c_uint64(got.pointer) if pointer is Pitched else got, *tail))
        if "Async" in allocate:
            check(lib[SYNCHRONISE[allocate[:2]]]())  # a pool lets go at a synchronisation
        yield "freed"

    return case


SYNCHRONISE = {"cu": "cuCtxSynchronize", "hi": "hipDeviceSynchronize"}


class Shape(ctypes.Structure):
    _fields_ = (("w", ctypes.c_size_t), ("h", ctypes.c_size_t), ("format", ctypes.c_uint), ("channels", ctypes.c_uint))


class Shape3(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_size_t) for name in "whd"),
        ("format", ctypes.c_uint),
        ("channels", ctypes.c_uint),
        ("flags", ctypes.c_uint),
    )


class Extent(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in "whd")


class Dim3(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in "xyz")


class Pitched(ctypes.Structure):
    _fields_ = (("pointer", ctypes.c_uint64), *((name, ctypes.c_size_t) for name in ("pitch", "width", "height")))


FLAT = ctypes.byref(Shape(1024, 512, 0x20, 4))
DEEP = ctypes.byref(Shape3(256, 64, 16, 0x10, 2, 0))
CHANNELS = ctypes.byref((ctypes.c_int * 5)(32, 32, 0, 0, 2))
OLD_FLAT = ctypes.byref((ctypes.c_uint * 4)(1024, 512, 0x20, 4))
OLD_DEEP = ctypes.byref((ctypes.c_uint * 6)(256, 64, 16, 0x10, 2, 0))
PITCH = ctypes.byref(ctypes.c_size_t())
ON_DEVICE = ctypes.byref((ctypes.c_int * 32)(1, 0, 1, 0))
ON_HOST = ctypes.byref((ctypes.c_int * 32)(1, 0, 2, 0))


def pooled(p: str, allocate: str, release: str) -> Case:
    """From a pool of its own that keeps what is freed, until it is trimmed and destroyed."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        pool, got = ctypes.c_void_p(), ctypes.c_uint64()
        check(lib[f"{p}MemPoolCreate"](ctypes.byref(pool), ON_DEVICE))
        check(lib[f"{p}MemPoolSetAttribute"](pool, 4, ctypes.byref(ctypes.c_uint64(1 << 60))))
        check(lib[allocate](ctypes.byref(got), size(SIZE), pool, NONE))
        yield "held"
        check(lib[release](got, NONE))
        check(lib[SYNCHRONISE[p[:2]]]())
        yield "held"  # freed, but the pool holds it
        check(lib[f"{p}MemPoolTrimTo"](pool, size(0)))
        yield "freed"
        check(lib[allocate](ctypes.byref(got), size(SIZE), pool, NONE))
        check(lib[release](got, NONE))
        check(lib[f"{p}MemPoolDestroy"](pool))
        check(lib[SYNCHRONISE[p[:2]]]())  # its frees are ordered by the stream: free for certain after this
        yield "freed"

    return case


def virtual(p: str) -> Case:
    """Memory lives until its last handle and its last mapping are gone, in either order."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        handle, again = ctypes.c_uint64(), ctypes.c_uint64()
        place = ctypes.c_uint64(0x700000000000)
        beyond = ctypes.c_uint64(0x700000000000 + SIZE)
        inside = ctypes.c_uint64(0x700000000000 + 4096)
        check(lib[f"{p}MemCreate"](ctypes.byref(handle), size(SIZE), ON_DEVICE, ctypes.c_uint64(0)))
        yield "held"
        check(lib[f"{p}MemMap"](place, size(SIZE), size(0), handle, ctypes.c_uint64(0)))
        check(lib[f"{p}MemMap"](beyond, size(SIZE), size(0), handle, ctypes.c_uint64(0)))
        check(lib[f"{p}MemRelease"](handle))
        yield "held"  # released, but mapped
        check(lib[f"{p}MemRetainAllocationHandle"](ctypes.byref(again), inside))
        check(lib[f"{p}MemUnmap"](place, size(2 * SIZE)))
        yield "held"  # unmapped, but a handle was taken from the mapping
        check(lib[f"{p}MemRelease"](again))
        yield "freed"
        check(lib[f"{p}MemCreate"](ctypes.byref(handle), size(SIZE), ON_HOST, ctypes.c_uint64(0)))
        yield "freed"  # host memory is not charged

    return case


def imported(p: str, ipc: str) -> Case:
    """Others' memory is not charged twice, and giving it back gives nothing back."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        got = ctypes.c_uint64()
        check(lib[f"{p}MemImportFromShareableHandle"](ctypes.byref(got), NONE, 0))
        check(lib[f"{p}MemMap"](ctypes.c_uint64(0x710000000000), size(SIZE), size(0), got, ctypes.c_uint64(0)))
        check(lib[f"{p}MemRelease"](got))
        check(lib[ipc](ctypes.byref(got), NONE, 0))
        check(lib[f"{p}IpcCloseMemHandle"](got))
        check(lib[f"{p}ImportExternalMemory"](ctypes.byref(got), NONE))
        check(lib[f"{p}DestroyExternalMemory"](got))
        check(lib[f"{p}MemPoolImportPointer"](ctypes.byref(got), NONE, NONE))
        yield "freed"

    return case


def exported(p: str, function: str) -> Case:
    """What was shared lives on without its handle: an importer may have it."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        handle = ctypes.c_uint64()
        check(lib[f"{p}MemCreate"](ctypes.byref(handle), size(SIZE), ON_DEVICE, ctypes.c_uint64(0)))
        check(lib[function](ctypes.byref(ctypes.c_uint64()), handle, 1, ctypes.c_uint64(0)))
        check(lib[f"{p}MemRelease"](handle))
        yield "held"

    return case


def sparse(p: str, function: str) -> Case:
    """Mapped into a sparse array: charged until the context or device is reset, since its unmapping names no handle."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        handle = ctypes.c_uint64()
        check(lib[f"{p}MemCreate"](ctypes.byref(handle), size(4 * KIB), ON_DEVICE, ctypes.c_uint64(0)))
        info = (ctypes.c_uint32 * 24)()
        info[14] = 1
        info[16], info[17] = handle.value & 0xFFFFFFFF, handle.value >> 32
        check(lib[function](ctypes.byref(info), 1, NONE))
        yield "held"

    return case


def node_parameters() -> "ctypes.Array[ctypes.c_uint64]":
    words = (ctypes.c_uint64 * 64)()
    words[0], words[1] = 1, 1  # pool: device memory, device 0
    words[13] = SIZE
    return words


def any_node() -> "ctypes.Array[ctypes.c_uint64]":
    words = (ctypes.c_uint64 * 64)()
    words[0] = 10
    words[2], words[3] = 1, 1
    words[15] = SIZE
    return words


def graph_memory(p: str, add: str, instantiate: str, launch: str) -> Case:
    """Charged when the node is made, taken when the graph runs, given back when graph, executable and cache are gone."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        graph, node, executable = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        check(lib[f"{p}GraphCreate"](ctypes.byref(graph), 0))
        parameters = ctypes.byref(node_parameters() if add.endswith("MemAllocNode") else any_node())
        extra = (NONE,) if add.endswith(("_v2", "_v3")) else ()
        check(lib[add](ctypes.byref(node), graph, NONE, *extra, size(0), parameters))
        yield "charged"
        tail = (NONE, NONE, size(0)) if instantiate.endswith(("Instantiate", "Instantiate_v2")) else (NONE,)
        check(lib[instantiate](ctypes.byref(executable), graph, *tail))
        check(lib[f"{p}GraphDestroy"](graph))
        check(lib[launch](executable, NONE))
        yield "held"
        check(lib[f"{p}GraphExecDestroy"](executable))
        yield "held"  # the driver keeps it
        check(lib[f"{p}DeviceGraphMemTrim"](0))
        yield "freed"

    return case


def captured(p: str, begin: str, allocate: str) -> Case:
    """An allocation on a stream that is being captured becomes the graph's."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        got, graph = ctypes.c_uint64(), ctypes.c_void_p()
        check(lib[begin](NONE, 0))
        check(lib[allocate](ctypes.byref(got), size(SIZE), NONE))
        check(lib[f"{p}StreamEndCapture"](NONE, ctypes.byref(graph)))
        yield "charged"
        check(lib[f"{p}GraphDestroy"](graph))
        yield "freed"

    return case


def reset(allocate: str, function: str, *arguments: object, before: str = "", given: tuple[object, ...] = (0,)) -> Case:
    """Whatever ends a context gives back what was allocated in it."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        got = ctypes.c_uint64()
        if before:
            check(lib[before](ctypes.byref(ctypes.c_uint64()), *given))
        check(lib[allocate](ctypes.byref(got), size(SIZE)))
        yield "held"
        check(lib[function](*arguments))
        yield "freed"

    return case


def work(function: str, *arguments: object) -> Case:
    """A launch, or a call that tells that work is done."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        check(lib[function](*arguments))
        yield "launched"

    return case


def unloads(launch: Case, function: str) -> Case:
    """The driver is called too, and launches go on."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        check(lib[function](NONE))
        yield from launch(lib)

    return case


def waits(launch: Case, function: str, *arguments: object) -> Case:
    def case(lib: ctypes.CDLL) -> Iterator[str]:
        yield from launch(lib)
        check(lib[function](*arguments))
        yield "done"

    return case


def event_waits(launch: Case, create: str, record: str, function: str, *more: object) -> Case:
    def case(lib: ctypes.CDLL) -> Iterator[str]:
        event = ctypes.c_void_p()
        check(lib[create](ctypes.byref(event), 0))
        yield from launch(lib)
        check(lib[record](event, NONE, *more))
        while lib[function](event) != 0:
            pass
        yield "done"

    return case


def shows(function: str, kind: type, *arguments: object) -> Case:
    """The cap, where the driver would tell the card's size."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        values = [kind() for _ in range(1 if arguments else 2)]
        check(lib[function](*(ctypes.byref(value) for value in values), *arguments))
        yield f"shows {values[-1].value}"

    return case


def shows_at(function: str, index: int, *, first: bool) -> Case:
    """The cap, in a structure that the driver fills."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        words = (ctypes.c_uint64 * 256)()
        arguments = (ctypes.byref(words), 0) if first else (ctypes.c_void_p(1), ctypes.byref(words))
        check(lib[function](*arguments))
        yield f"shows {words[index]}"

    return case


def found(lookup: str, base: str, *arguments: object) -> Case:
    """What a lookup by name answers is charged like the function itself."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        address, got = ctypes.c_void_p(), ctypes.c_uint64()
        check(lib[lookup](base.encode(), ctypes.byref(address), *arguments))
        function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)(address.value or 0)
        check(function(ctypes.addressof(got), SIZE))
        yield "held"
        check(lib["cuMemFree_v2" if base.startswith("cu") else "hipFree"](got))
        yield "freed"

    return case


def limited(function: str, limit: int) -> Case:
    """A larger heap of device code is charged, and a smaller one gives it back."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        check(lib[function](limit, size(8 * MIB + SIZE)))
        yield "held"
        check(lib[function](limit, size(8 * MIB)))
        yield "freed"

    return case


def context(create: str, *arguments: object, destroy: str = "cuCtxDestroy_v2") -> Case:
    """Admitted before it is made; the memory is freed with it."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        made, got, former = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
        check(lib[create](ctypes.byref(made), *arguments))
        check(lib.cuCtxPushCurrent_v2(made))
        check(lib.cuMemAlloc_v2(ctypes.byref(got), size(SIZE)))
        yield "held"
        check(lib.cuCtxPopCurrent_v2(ctypes.byref(former)))
        check(lib[destroy](made))
        yield "freed"

    return case


def stream_case(
    p: str, create: str, function: str, *arguments: object, end: str = "", made_with: tuple[object, ...] = (0,)
) -> Case:
    """A call on a stream of its own, after a launch on it."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
        check(lib[create](ctypes.byref(stream), *made_with))
        if p == "cu":
            check(lib.cuLaunchKernel(NONE, *SIZES, 0, stream, NONE, NONE))
        else:
            check(lib.hipLaunchKernel(NONE, Dim3(1, 1, 1), Dim3(1, 1, 1), NONE, size(0), stream))
        check(lib[function](stream, *arguments))
        if end:
            check(lib[end](stream, ctypes.byref(graph)))
        yield "launched"

    return case


def waiting_stream(launch: Case, p: str, create: str, function: str) -> Case:
    """Work on the default stream is finished when a stream that waited for it is."""

    def case(lib: ctypes.CDLL) -> Iterator[str]:
        stream, event = ctypes.c_void_p(), ctypes.c_void_p()
        check(lib[create](ctypes.byref(stream), 1))
        check(lib["cuEventCreate" if p == "cu" else "hipEventCreateWithFlags"](ctypes.byref(event), 0))
        yield from launch(lib)
        check(lib[f"{p}EventRecord"](event, NONE))
        check(lib[function](stream, event, 0))
        check(lib[f"{p}StreamSynchronize"](stream))
        yield "done"

    return case


SIZES = (1, 1, 1, 1, 1, 1)
CONFIG = ctypes.byref((ctypes.c_uint64 * 16)())
KERNEL = work("cuLaunchKernel", NONE, *SIZES, 0, NONE, NONE, NONE)
HIP_KERNEL = work("hipLaunchKernel", NONE, Dim3(1, 1, 1), Dim3(1, 1, 1), NONE, size(0), NONE)
U32 = ctypes.c_uint32
HOST = ctypes.byref(ctypes.c_uint64())
ADDRESS = ctypes.c_uint64(8)
SET_FORMS = {form: [(bits, tail) for bits in (8, 16, 32) for tail in ("", f"_{form}")] for form in ("ptds", "ptsz")}
PER_THREAD_KERNEL = work("cuLaunchKernel_ptsz", NONE, *SIZES, 0, NONE, NONE, NONE)
PER_THREAD_HIP_KERNEL = work("hipLaunchKernel_spt", NONE, Dim3(1, 1, 1), Dim3(1, 1, 1), NONE, size(0), NONE)
FLAGS, NO_FLAGS = ctypes.c_uint64(2), ctypes.c_uint64(0)

CUDA: dict[str, Case] = {
    "cuMemAlloc": plain("cuMemAlloc", "cuMemFree", SIZE, pointer=U32),
    "cuMemFree": plain("cuMemAlloc", "cuMemFree", SIZE, pointer=U32),
    "cuMemAlloc_v2": plain("cuMemAlloc_v2", "cuMemFree_v2", size(SIZE)),
    "cuMemFree_v2": plain("cuMemAllocAsync", "cuMemFree_v2", size(SIZE), NONE),
    "cuMemAllocPitch": plain("cuMemAllocPitch", "cuMemFree", PITCH, 1000, 300, 4, pointer=U32),
    "cuMemAllocPitch_v2": plain("cuMemAllocPitch_v2", "cuMemFree_v2", PITCH, size(1000), size(300), 4),
    "cuMemAllocManaged": plain("cuMemAllocManaged", "cuMemFree_v2", size(SIZE), 1),
    "cuMemAllocAsync": plain("cuMemAllocAsync", "cuMemFreeAsync", size(SIZE), NONE, tail=(NONE,)),
    "cuMemFreeAsync": plain("cuMemAllocAsync", "cuMemFreeAsync", size(SIZE), NONE, tail=(NONE,)),
    "cuMemAllocAsync_ptsz": plain("cuMemAllocAsync_ptsz", "cuMemFreeAsync_ptsz", size(SIZE), NONE, tail=(NONE,)),
    "cuMemFreeAsync_ptsz": captured("cu", "cuStreamBeginCapture_v2", "cuMemAllocAsync"),
    "cuMemAllocFromPoolAsync": pooled("cu", "cuMemAllocFromPoolAsync", "cuMemFreeAsync"),
    "cuMemAllocFromPoolAsync_ptsz": pooled("cu", "cuMemAllocFromPoolAsync_ptsz", "cuMemFreeAsync_ptsz"),
    "cuMemPoolCreate": pooled("cu", "cuMemAllocFromPoolAsync", "cuMemFreeAsync"),
    "cuMemPoolDestroy": pooled("cu", "cuMemAllocFromPoolAsync", "cuMemFreeAsync"),
    "cuMemPoolTrimTo": pooled("cu", "cuMemAllocFromPoolAsync", "cuMemFreeAsync"),
    "cuArrayCreate": plain("cuArrayCreate", "cuArrayDestroy", OLD_FLAT),
    "cuArrayCreate_v2": plain("cuArrayCreate_v2", "cuArrayDestroy", FLAT),
    "cuArray3DCreate": plain("cuArray3DCreate", "cuArrayDestroy", OLD_DEEP),
    "cuArray3DCreate_v2": plain("cuArray3DCreate_v2", "cuArrayDestroy", DEEP),
    "cuArrayDestroy": plain("cuArrayCreate_v2", "cuArrayDestroy", FLAT),
    "cuMipmappedArrayCreate": plain("cuMipmappedArrayCreate", "cuMipmappedArrayDestroy", DEEP, 5),
    "cuMipmappedArrayDestroy": plain("cuMipmappedArrayCreate", "cuMipmappedArrayDestroy", DEEP, 2),
    "cuMemCreate": virtual("cu"),
    "cuMemMap": imported("cu", "cuIpcOpenMemHandle_v2"),
    "cuMemExportToShareableHandle": exported("cu", "cuMemExportToShareableHandle"),
    "cuMemUnmap": virtual("cu"),
    "cuMemRelease": virtual("cu"),
    "cuMemRetainAllocationHandle": virtual("cu"),
    "cuGraphAddMemAllocNode": graph_memory("cu", "cuGraphAddMemAllocNode", "cuGraphInstantiate", "cuGraphLaunch"),
    "cuGraphAddNode": graph_memory("cu", "cuGraphAddNode", "cuGraphInstantiate_v2", "cuGraphLaunch_ptsz"),
    "cuGraphAddNode_v2": graph_memory("cu", "cuGraphAddNode_v2", "cuGraphInstantiateWithFlags", "cuGraphLaunch"),
    "cuGraphAddNode_v3": graph_memory("cu", "cuGraphAddNode_v3", "cuGraphInstantiateWithFlags", "cuGraphLaunch"),
    "cuGraphInstantiate": graph_memory("cu", "cuGraphAddNode", "cuGraphInstantiate", "cuGraphLaunch"),
    "cuGraphInstantiate_v2": graph_memory("cu", "cuGraphAddNode", "cuGraphInstantiate_v2", "cuGraphLaunch"),
    "cuGraphInstantiateWithFlags": graph_memory("cu", "cuGraphAddNode", "cuGraphInstantiateWithFlags", "cuGraphLaunch"),
    "cuGraphInstantiateWithParams": graph_memory("cu", "cuGraphAddNode", "cuGraphInstantiateWithParams", "cuGraphLaunch"),
    "cuGraphInstantiateWithParams_ptsz": graph_memory(
        "cu", "cuGraphAddNode", "cuGraphInstantiateWithParams_ptsz", "cuGraphLaunch"
    ),
    "cuModuleUnload": unloads(KERNEL, "cuModuleUnload"),
    "cuLibraryUnload": unloads(KERNEL, "cuLibraryUnload"),
    "cuGraphDestroy": captured("cu", "cuStreamBeginCapture_v2", "cuMemAllocAsync"),
    "cuGraphExecDestroy": graph_memory("cu", "cuGraphAddNode", "cuGraphInstantiateWithFlags", "cuGraphLaunch"),
    "cuDeviceGraphMemTrim": graph_memory("cu", "cuGraphAddNode", "cuGraphInstantiateWithFlags", "cuGraphLaunch"),
    "cuMemMapArrayAsync": sparse("cu", "cuMemMapArrayAsync"),
    "cuMemMapArrayAsync_ptsz": sparse("cu", "cuMemMapArrayAsync_ptsz"),
    "cuCtxCreate": context("cuCtxCreate", 0, 0),
    "cuCtxCreate_v2": context("cuCtxCreate_v2", 0, 0),
    "cuCtxCreate_v3": context("cuCtxCreate_v3", NONE, 0, 0, 0),
    "cuCtxCreate_v4": context("cuCtxCreate_v4", NONE, 0, 0),
    "cuCtxSetLimit": limited("cuCtxSetLimit", 2),
    "cuGreenCtxCreate": context("cuGreenCtxCreate", NONE, 0, 0),
    "cuGLCtxCreate": context("cuGLCtxCreate", 0, 0),
    "cuGLCtxCreate_v2": context("cuGLCtxCreate_v2", 0, 0),
    "cuVDPAUCtxCreate": context("cuVDPAUCtxCreate", 0, 0, 0, NONE),
    "cuVDPAUCtxCreate_v2": context("cuVDPAUCtxCreate_v2", 0, 0, 0, NONE),
    "cuCtxDestroy": context("cuCtxCreate_v2", 0, 0, destroy="cuCtxDestroy"),
    "cuCtxDestroy_v2": context("cuCtxCreate_v2", 0, 0),
    "cuDevicePrimaryCtxRetain": reset("cuMemAlloc_v2", "cuDevicePrimaryCtxRelease", 0, before="cuDevicePrimaryCtxRetain"),
    "cuDevicePrimaryCtxRelease": reset("cuMemAlloc_v2", "cuDevicePrimaryCtxRelease", 0),
    "cuDevicePrimaryCtxRelease_v2": reset("cuMemAlloc_v2", "cuDevicePrimaryCtxRelease_v2", 0),
    "cuDevicePrimaryCtxReset": reset("cuMemAlloc_v2", "cuDevicePrimaryCtxReset", 0),
    "cuDevicePrimaryCtxReset_v2": reset("cuMemAlloc_v2", "cuDevicePrimaryCtxReset_v2", 0),
    "cuMemGetInfo": shows("cuMemGetInfo", U32),
    "cuMemGetInfo_v2": shows("cuMemGetInfo_v2", ctypes.c_size_t),
    "cuDeviceTotalMem": shows("cuDeviceTotalMem", U32, 0),
    "cuDeviceTotalMem_v2": shows("cuDeviceTotalMem_v2", ctypes.c_size_t, 0),
    "nvmlDeviceGetMemoryInfo": shows_at("nvmlDeviceGetMemoryInfo", 0, first=False),
    "nvmlDeviceGetMemoryInfo_v2": shows_at("nvmlDeviceGetMemoryInfo_v2", 1, first=False),
    "cuLaunch": work("cuLaunch", NONE),
    "cuLaunchGrid": work("cuLaunchGrid", NONE, 1, 1),
    "cuLaunchGridAsync": work("cuLaunchGridAsync", NONE, 1, 1, NONE),
    "cuLaunchKernel": KERNEL,
    "cuLaunchKernel_ptsz": work("cuLaunchKernel_ptsz", NONE, *SIZES, 0, NONE, NONE, NONE),
    "cuLaunchKernelEx": work("cuLaunchKernelEx", CONFIG, NONE, NONE, NONE),
    "cuLaunchKernelEx_ptsz": work("cuLaunchKernelEx_ptsz", CONFIG, NONE, NONE, NONE),
    "cuLaunchCooperativeKernel": work("cuLaunchCooperativeKernel", NONE, *SIZES, 0, NONE, NONE),
    "cuLaunchCooperativeKernel_ptsz": work("cuLaunchCooperativeKernel_ptsz", NONE, *SIZES, 0, NONE, NONE),
    "cuLaunchCooperativeKernelMultiDevice": work("cuLaunchCooperativeKernelMultiDevice", CONFIG, 1, 0),
    "cuGraphLaunch": work("cuGraphLaunch", ctypes.c_void_p(60000), NONE),
    "cuGraphLaunch_ptsz": work("cuGraphLaunch_ptsz", ctypes.c_void_p(60000), NONE),
    "cuMemcpyDtoD_v2": work("cuMemcpyDtoD_v2", ADDRESS, ADDRESS, size(8)),
    "cuMemcpyDtoD_v2_ptds": work("cuMemcpyDtoD_v2_ptds", ADDRESS, ADDRESS, size(8)),
    "cuMemcpyDtoDAsync_v2": work("cuMemcpyDtoDAsync_v2", ADDRESS, ADDRESS, size(8), NONE),
    "cuMemcpyDtoDAsync_v2_ptsz": work("cuMemcpyDtoDAsync_v2_ptsz", ADDRESS, ADDRESS, size(8), NONE),
    **{f"cuMemsetD{bits}_v2{form}": work(f"cuMemsetD{bits}_v2{form}", ADDRESS, 0, size(8)) for bits, form in SET_FORMS["ptds"]},
    **{
        f"cuMemsetD{bits}Async{form}": work(f"cuMemsetD{bits}Async{form}", ADDRESS, 0, size(8), NONE)
        for bits, form in SET_FORMS["ptsz"]
    },
    **{
        f"cuMemsetD2D{bits}_v2{form}": work(f"cuMemsetD2D{bits}_v2{form}", ADDRESS, size(8), 0, size(8), size(8))
        for bits, form in SET_FORMS["ptds"]
    },
    **{
        f"cuMemsetD2D{bits}Async{form}": work(f"cuMemsetD2D{bits}Async{form}", ADDRESS, size(8), 0, size(8), size(8), NONE)
        for bits, form in SET_FORMS["ptsz"]
    },
    "cuStreamCreate": stream_case("cu", "cuStreamCreate", "cuStreamDestroy_v2"),
    "cuStreamCreateWithPriority": stream_case("cu", "cuStreamCreateWithPriority", "cuStreamDestroy_v2", made_with=(0, 0)),
    "cuGreenCtxStreamCreate": stream_case("cu", "cuGreenCtxStreamCreate", "cuStreamDestroy_v2", made_with=(NONE, 1, 0)),
    "cuStreamDestroy": stream_case("cu", "cuStreamCreate", "cuStreamDestroy"),
    "cuStreamDestroy_v2": stream_case("cu", "cuStreamCreate", "cuStreamDestroy_v2"),
    "cuStreamBeginCapture": stream_case("cu", "cuStreamCreate", "cuStreamBeginCapture", end="cuStreamEndCapture"),
    **{
        name: stream_case("cu", "cuStreamCreate", name, 0, end="cuStreamEndCapture")
        for name in ("cuStreamBeginCapture_ptsz", "cuStreamBeginCapture_v2", "cuStreamBeginCapture_v2_ptsz")
    },
    **{
        name: stream_case("cu", "cuStreamCreate", name, NONE, NONE, NONE, size(0), 0, end="cuStreamEndCapture")
        for name in ("cuStreamBeginCaptureToGraph", "cuStreamBeginCaptureToGraph_ptsz")
    },
    "cuStreamEndCapture": stream_case("cu", "cuStreamCreate", "cuStreamBeginCapture", end="cuStreamEndCapture"),
    "cuStreamEndCapture_ptsz": stream_case(
        "cu", "cuStreamCreate", "cuStreamBeginCapture_ptsz", 0, end="cuStreamEndCapture_ptsz"
    ),
    "cuStreamWaitEvent": waiting_stream(KERNEL, "cu", "cuStreamCreate", "cuStreamWaitEvent"),
    "cuStreamWaitEvent_ptsz": waiting_stream(KERNEL, "cu", "cuStreamCreate", "cuStreamWaitEvent_ptsz"),
    "cuCtxSynchronize": waits(KERNEL, "cuCtxSynchronize"),
    "cuCtxSynchronize_v2": waits(KERNEL, "cuCtxSynchronize_v2", NONE),
    "cuStreamSynchronize": waits(KERNEL, "cuStreamSynchronize", NONE),
    "cuStreamSynchronize_ptsz": waits(PER_THREAD_KERNEL, "cuStreamSynchronize_ptsz", NONE),
    "cuStreamQuery": waits(KERNEL, "cuStreamQuery", NONE),
    "cuStreamQuery_ptsz": waits(PER_THREAD_KERNEL, "cuStreamQuery_ptsz", NONE),
    "cuMemcpyDtoH_v2": waits(KERNEL, "cuMemcpyDtoH_v2", HOST, ctypes.c_uint64(8), size(8)),
    "cuMemcpyDtoH_v2_ptds": waits(PER_THREAD_KERNEL, "cuMemcpyDtoH_v2_ptds", HOST, ctypes.c_uint64(8), size(8)),
    "cuEventRecord": event_waits(KERNEL, "cuEventCreate", "cuEventRecord", "cuEventQuery"),
    "cuEventRecord_ptsz": event_waits(PER_THREAD_KERNEL, "cuEventCreate", "cuEventRecord_ptsz", "cuEventSynchronize"),
    "cuEventRecordWithFlags": event_waits(KERNEL, "cuEventCreate", "cuEventRecordWithFlags", "cuEventSynchronize", 0),
    "cuEventRecordWithFlags_ptsz": event_waits(
        PER_THREAD_KERNEL, "cuEventCreate", "cuEventRecordWithFlags_ptsz", "cuEventQuery", 0
    ),
    "cuEventSynchronize": event_waits(KERNEL, "cuEventCreate", "cuEventRecord", "cuEventSynchronize"),
    "cuEventQuery": event_waits(KERNEL, "cuEventCreate", "cuEventRecord", "cuEventQuery"),
    "cuGetProcAddress": found("cuGetProcAddress", "cuMemAlloc", 11030, NO_FLAGS),
    "cuGetProcAddress_v2": found("cuGetProcAddress_v2", "cuMemAlloc", 12000, FLAGS, NONE),
}

HIP_SETS = ["hipMemset", "hipMemset_spt", "hipMemsetD8", "hipMemsetD16", "hipMemsetD32"]
HIP_ASYNC_SETS = ["hipMemsetAsync", "hipMemsetAsync_spt", "hipMemsetD8Async", "hipMemsetD16Async", "hipMemsetD32Async"]

HIP: dict[str, Case] = {
    "hipMalloc": plain("hipMalloc", "hipFree", size(SIZE)),
    "hipFree": plain("hipMallocAsync", "hipFree", size(SIZE), NONE),
    "hipExtMallocWithFlags": plain("hipExtMallocWithFlags", "hipFree", size(SIZE), 0),
    "hipMallocManaged": plain("hipMallocManaged", "hipFree", size(SIZE), 1),
    "hipMallocAsync": plain("hipMallocAsync", "hipFreeAsync", size(SIZE), NONE, tail=(NONE,)),
    "hipFreeAsync": captured("hip", "hipStreamBeginCapture", "hipMallocAsync"),
    "hipMallocFromPoolAsync": pooled("hip", "hipMallocFromPoolAsync", "hipFreeAsync"),
    "hipMemPoolCreate": pooled("hip", "hipMallocFromPoolAsync", "hipFreeAsync"),
    "hipMemPoolDestroy": pooled("hip", "hipMallocFromPoolAsync", "hipFreeAsync"),
    "hipMemPoolTrimTo": pooled("hip", "hipMallocFromPoolAsync", "hipFreeAsync"),
    "hipMallocPitch": plain("hipMallocPitch", "hipFree", PITCH, size(1000), size(300)),
    "hipMemAllocPitch": plain("hipMemAllocPitch", "hipFree", PITCH, size(1000), size(300), 4),
    "hipMalloc3D": plain("hipMalloc3D", "hipFree", Extent(1000, 20, 30), pointer=Pitched),
    "hipMallocArray": plain("hipMallocArray", "hipFreeArray", CHANNELS, size(512), size(512), 0),
    "hipFreeArray": plain("hipMallocArray", "hipFreeArray", CHANNELS, size(512), size(0), 0),
    "hipMalloc3DArray": plain("hipMalloc3DArray", "hipFreeArray", CHANNELS, Extent(64, 64, 64), 0),
    "hipArrayCreate": plain("hipArrayCreate", "hipArrayDestroy", FLAT),
    "hipArray3DCreate": plain("hipArray3DCreate", "hipArrayDestroy", DEEP),
    "hipArrayDestroy": plain("hipArrayCreate", "hipArrayDestroy", FLAT),
    "hipMallocMipmappedArray": plain("hipMallocMipmappedArray", "hipFreeMipmappedArray", CHANNELS, Extent(64, 64, 0), 4, 0),
    "hipFreeMipmappedArray": plain("hipMallocMipmappedArray", "hipFreeMipmappedArray", CHANNELS, Extent(64, 64, 0), 1, 0),
    "hipMipmappedArrayCreate": plain("hipMipmappedArrayCreate", "hipMipmappedArrayDestroy", DEEP, 5),
    "hipMipmappedArrayDestroy": plain("hipMipmappedArrayCreate", "hipMipmappedArrayDestroy", DEEP, 1),
    "hipMemCreate": virtual("hip"),
    "hipMemMap": imported("hip", "hipIpcOpenMemHandle"),
    "hipMemExportToShareableHandle": exported("hip", "hipMemExportToShareableHandle"),
    "hipMemUnmap": virtual("hip"),
    "hipMemRelease": virtual("hip"),
    "hipMemRetainAllocationHandle": virtual("hip"),
    "hipGraphAddMemAllocNode": graph_memory("hip", "hipGraphAddMemAllocNode", "hipGraphInstantiate", "hipGraphLaunch"),
    "hipGraphAddNode": graph_memory("hip", "hipGraphAddNode", "hipGraphInstantiateWithFlags", "hipGraphLaunch_spt"),
    "hipGraphInstantiate": graph_memory("hip", "hipGraphAddNode", "hipGraphInstantiate", "hipGraphLaunch"),
    "hipGraphInstantiateWithFlags": graph_memory("hip", "hipGraphAddNode", "hipGraphInstantiateWithFlags", "hipGraphLaunch"),
    "hipGraphInstantiateWithParams": graph_memory("hip", "hipGraphAddNode", "hipGraphInstantiateWithParams", "hipGraphLaunch"),
    "hipModuleUnload": unloads(HIP_KERNEL, "hipModuleUnload"),
    "hipLibraryUnload": unloads(HIP_KERNEL, "hipLibraryUnload"),
    "hipGraphDestroy": captured("hip", "hipStreamBeginCapture", "hipMallocAsync"),
    "hipGraphExecDestroy": graph_memory("hip", "hipGraphAddNode", "hipGraphInstantiate", "hipGraphLaunch"),
    "hipDeviceGraphMemTrim": graph_memory("hip", "hipGraphAddNode", "hipGraphInstantiate", "hipGraphLaunch"),
    "hipMemMapArrayAsync": sparse("hip", "hipMemMapArrayAsync"),
    "hipDeviceReset": reset("hipMalloc", "hipDeviceReset"),
    "hipMemGetInfo": shows("hipMemGetInfo", ctypes.c_size_t),
    "hipDeviceTotalMem": shows("hipDeviceTotalMem", ctypes.c_size_t, 0),
    "hipGetDeviceProperties": shows_at("hipGetDeviceProperties", 32, first=True),
    "hipGetDevicePropertiesR0000": shows_at("hipGetDevicePropertiesR0000", 32, first=True),
    "hipGetDevicePropertiesR0600": shows_at("hipGetDevicePropertiesR0600", 36, first=True),
    "hipLaunchKernel": HIP_KERNEL,
    "hipLaunchKernel_spt": work("hipLaunchKernel_spt", NONE, Dim3(1, 1, 1), Dim3(1, 1, 1), NONE, size(0), NONE),
    "hipLaunchKernelExC": work("hipLaunchKernelExC", CONFIG, NONE, NONE),
    "hipDrvLaunchKernelEx": work("hipDrvLaunchKernelEx", CONFIG, NONE, NONE, NONE),
    "hipExtLaunchKernel": work("hipExtLaunchKernel", NONE, Dim3(1, 1, 1), Dim3(1, 1, 1), NONE, size(0), NONE, NONE, NONE, 0),
    "hipModuleLaunchKernel": work("hipModuleLaunchKernel", NONE, *SIZES, 0, NONE, NONE, NONE),
    "hipExtModuleLaunchKernel": work("hipExtModuleLaunchKernel", NONE, *SIZES, size(0), NONE, NONE, NONE, NONE, NONE, 0),
    "hipHccModuleLaunchKernel": work("hipHccModuleLaunchKernel", NONE, *SIZES, size(0), NONE, NONE, NONE, NONE, NONE),
    "hipLaunchCooperativeKernel": work("hipLaunchCooperativeKernel", NONE, Dim3(1, 1, 1), Dim3(1, 1, 1), NONE, 0, NONE),
    "hipLaunchCooperativeKernel_spt": work("hipLaunchCooperativeKernel_spt", NONE, Dim3(1, 1, 1), Dim3(1, 1, 1), NONE, 0, NONE),
    "hipModuleLaunchCooperativeKernel": work("hipModuleLaunchCooperativeKernel", NONE, *SIZES, 0, NONE, NONE),
    "hipGraphLaunch": work("hipGraphLaunch", ctypes.c_void_p(60000), NONE),
    "hipGraphLaunch_spt": work("hipGraphLaunch_spt", ctypes.c_void_p(60000), NONE),
    "hipDeviceSynchronize": waits(HIP_KERNEL, "hipDeviceSynchronize"),
    "hipStreamSynchronize": waits(HIP_KERNEL, "hipStreamSynchronize", NONE),
    "hipMemcpy": waits(HIP_KERNEL, "hipMemcpy", HOST, NONE, size(8), 2),
    "hipMemcpy_spt": waits(PER_THREAD_HIP_KERNEL, "hipMemcpy_spt", HOST, NONE, size(8), 2),
    "hipMemcpyWithStream": waits(HIP_KERNEL, "hipMemcpyWithStream", HOST, NONE, size(8), 2, NONE),
    "hipMemcpyDtoH": waits(HIP_KERNEL, "hipMemcpyDtoH", HOST, NONE, size(8)),
    "hipStreamSynchronize_spt": waits(PER_THREAD_HIP_KERNEL, "hipStreamSynchronize_spt", NONE),
    "hipStreamQuery": waits(HIP_KERNEL, "hipStreamQuery", NONE),
    "hipStreamQuery_spt": waits(PER_THREAD_HIP_KERNEL, "hipStreamQuery_spt", NONE),
    "hipEventRecord": event_waits(HIP_KERNEL, "hipEventCreateWithFlags", "hipEventRecord", "hipEventQuery"),
    "hipEventRecord_spt": event_waits(
        PER_THREAD_HIP_KERNEL, "hipEventCreateWithFlags", "hipEventRecord_spt", "hipEventSynchronize"
    ),
    "hipEventSynchronize": event_waits(HIP_KERNEL, "hipEventCreateWithFlags", "hipEventRecord", "hipEventSynchronize"),
    "hipEventQuery": event_waits(HIP_KERNEL, "hipEventCreateWithFlags", "hipEventRecord", "hipEventQuery"),
    "hipGetProcAddress": found("hipGetProcAddress", "hipMalloc", 7000, NO_FLAGS, NONE),
    "hipDevicePrimaryCtxReset": reset("hipMalloc", "hipDevicePrimaryCtxReset", 0),
    "hipDeviceSetLimit": limited("hipDeviceSetLimit", 2),
    "hipLaunchCooperativeKernelMultiDevice": work("hipLaunchCooperativeKernelMultiDevice", CONFIG, 1, 0),
    "hipModuleLaunchCooperativeKernelMultiDevice": work("hipModuleLaunchCooperativeKernelMultiDevice", CONFIG, 1, 0),
    "hipExtLaunchMultiKernelMultiDevice": work("hipExtLaunchMultiKernelMultiDevice", CONFIG, 1, 0),
    "hipLaunchByPtr": work("hipLaunchByPtr", NONE),
    "hipMemcpyAsync": work("hipMemcpyAsync", NONE, NONE, size(8), 3, NONE),
    "hipMemcpyAsync_spt": work("hipMemcpyAsync_spt", NONE, NONE, size(8), 3, NONE),
    "hipMemcpyDtoD": work("hipMemcpyDtoD", NONE, NONE, size(8)),
    "hipMemcpyDtoDAsync": work("hipMemcpyDtoDAsync", NONE, NONE, size(8), NONE),
    **{name: work(name, NONE, 0, size(8)) for name in HIP_SETS},
    **{name: work(name, NONE, 0, size(8), NONE) for name in HIP_ASYNC_SETS},
    "hipStreamDestroy": stream_case("hip", "hipStreamCreateWithFlags", "hipStreamDestroy"),
    **{
        name: stream_case("hip", "hipStreamCreateWithFlags", name, 0, end="hipStreamEndCapture")
        for name in ("hipStreamBeginCapture", "hipStreamBeginCapture_spt")
    },
    "hipStreamBeginCaptureToGraph": stream_case(
        "hip",
        "hipStreamCreateWithFlags",
        "hipStreamBeginCaptureToGraph",
        NONE,
        NONE,
        NONE,
        size(0),
        0,
        end="hipStreamEndCapture",
    ),
    **{
        f"hipStreamEndCapture{form}": stream_case(
            "hip", "hipStreamCreateWithFlags", f"hipStreamBeginCapture{form}", 0, end=f"hipStreamEndCapture{form}"
        )
        for form in ("", "_spt")
    },
    "hipStreamWaitEvent": waiting_stream(HIP_KERNEL, "hip", "hipStreamCreateWithFlags", "hipStreamWaitEvent"),
    "hipStreamWaitEvent_spt": waiting_stream(HIP_KERNEL, "hip", "hipStreamCreateWithFlags", "hipStreamWaitEvent_spt"),
    "hipCtxSynchronize": waits(HIP_KERNEL, "hipCtxSynchronize"),
    "hipEventRecordWithFlags": event_waits(
        HIP_KERNEL, "hipEventCreateWithFlags", "hipEventRecordWithFlags", "hipEventSynchronize", 0
    ),
    "hipGetProcAddress_spt": found("hipGetProcAddress_spt", "hipMalloc", 7000, NO_FLAGS, NONE),
    "hipGetDriverEntryPoint": found("hipGetDriverEntryPoint", "hipMalloc", NO_FLAGS, NONE),
    "hipGetDriverEntryPoint_spt": found("hipGetDriverEntryPoint_spt", "hipMalloc", NO_FLAGS, NONE),
}


def main() -> None:
    cases = CUDA if sys.argv[1] == "cuda" else HIP
    if sys.argv[2:] == ["names"]:
        sys.stdout.write("\n".join(cases))
        return
    lib = ctypes.CDLL("libcuda.so.1" if sys.argv[1] == "cuda" else "libamdhip64.so.7")
    for name, case in cases.items():
        check(lib[SYNCHRONISE[sys.argv[1][:2]]]())  # what earlier cases launched is finished
        for stop in chain(["start"], case(lib)):
            sys.stdout.write(f"{name} {stop}\n")
            sys.stdout.flush()
            sys.stdin.readline()


if __name__ == "__main__":
    main()
