"""Generated from native/functions.def: every wrapped function is called, found by every lookup, and counted right."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aimgpu.domain import Priority
from aimgpu.isolation import building
from aimgpu.units import GIB

HERE = Path(__file__).parent
FUNCTIONS = HERE / "programs" / "functions.py"
SIZE = 3 * (1 << 20) + 512
HOOKS = re.findall(r"^HOOK\((\w+), (\w+), (\d+)\)", (building.find_sources() / "functions.def").read_text(), re.MULTILINE)
NAMES = {"cuda": [name for name, api, _ in HOOKS if api != "HIP"], "hip": [name for name, api, _ in HOOKS if api == "HIP"]}
SUFFIX = re.compile(r"(_v\d)?(_ptsz|_ptds|_spt)?$")


# Exported by libamdhip64 7.2.4, by what a cap must do about them.
HIP_TAKES = [
    "hipMalloc",
    "hipExtMallocWithFlags",
    "hipMallocManaged",
    "hipMallocAsync",
    "hipMallocFromPoolAsync",
    "hipMallocPitch",
    "hipMemAllocPitch",
    "hipMalloc3D",
    "hipMallocArray",
    "hipMalloc3DArray",
    "hipArrayCreate",
    "hipArray3DCreate",
    "hipMallocMipmappedArray",
    "hipMipmappedArrayCreate",
    "hipMemCreate",
    "hipGraphAddMemAllocNode",
    "hipGraphLaunch",
    "hipMemPoolCreate",
]
HIP_GIVES_BACK = [
    "hipFree",
    "hipFreeAsync",
    "hipFreeArray",
    "hipArrayDestroy",
    "hipFreeMipmappedArray",
    "hipMipmappedArrayDestroy",
    "hipMemRelease",
    "hipMemPoolDestroy",
    "hipMemPoolTrimTo",
    "hipDeviceGraphMemTrim",
    "hipDeviceReset",
]
HIP_SHOWS = [
    "hipMemGetInfo",
    "hipDeviceTotalMem",
    "hipGetDeviceProperties",
    "hipGetDevicePropertiesR0600",
    "hipGetDevicePropertiesR0000",
    "hipGetProcAddress",
]
# Left as they are: what they tell is of the tenant's own pools and graphs alone.
HIP_OWN = ["hipMemPoolSetAttribute", "hipMemPoolGetAttribute", "hipDeviceGetGraphMemAttribute"]
# And these: what they map was charged to who made it, lies on the host, or is part of the context.
HIP_UNCHARGED = [
    "hipImportExternalMemory",
    "hipMemImportFromShareableHandle",
    "hipIpcOpenMemHandle",
    "hipMemPoolImportPointer",
    "hipDestroyExternalMemory",
    "hipIpcCloseMemHandle",
    "hipGraphAddMemFreeNode",
    "hipDrvGraphAddMemFreeNode",
    "hipModuleLoad",
    "hipModuleLoadData",
    "hipHostMalloc",
    "hipHostAlloc",
    "hipMallocHost",
    "hipMemAllocHost",
    "hipHostRegister",
    "hipHostFree",
    "hipFreeHost",
]


def test_the_table_is_whole() -> None:
    """Every HIP function that takes, gives back or shows memory is on the list, and none that must not be charged."""
    assert len(HOOKS) == len({name for name, _, _ in HOOKS})
    assert {*HIP_TAKES, *HIP_GIVES_BACK, *HIP_SHOWS} <= set(NAMES["hip"])
    assert not {*HIP_UNCHARGED, *HIP_OWN} & set(NAMES["hip"])
    assert len(NAMES["cuda"]) > 75


UNCHARGED = """
import ctypes, sys
lib = ctypes.CDLL("libamdhip64.so.7")
for name in sys.argv[1:]:
    room = (ctypes.c_uint64 * 64)()
    assert lib[name](ctypes.byref(room), ctypes.c_size_t(8 << 20), 4, 0, 0) in (0, 1), name
print("called")
input()
"""


def test_what_must_not_be_charged_is_not(rig: Any, tmp_path: Path) -> None:
    """Imports, host memory, code objects and limits: called once each, and the tenant is charged nothing."""
    rig.admit(cap_bytes=1 * GIB)
    program = tmp_path / "uncharged.py"
    program.write_text(UNCHARGED)
    process = rig.start(program, *HIP_UNCHARGED)
    assert process.stdout is not None
    assert process.stdout.readline() == "called\n", process.communicate()
    assert rig.used() == rig.region.read_use()[0].denied == 0


@pytest.mark.parametrize("api", ["cuda", "hip"])
def test_every_function_has_a_case(api: str) -> None:
    known = subprocess.run([sys.executable, FUNCTIONS, api, "names"], check=True, capture_output=True, text=True).stdout.split()
    assert set(known) == set(NAMES[api])


@pytest.mark.parametrize("api", ["cuda", "hip"])
def test_every_function_is_counted_as_the_driver_counts(rig: Any, api: str) -> None:
    """At every stop of every function, what the region says is what the driver gave."""
    rig.admit(cap_bytes=3 * GIB, priority=Priority.HIGH)
    process = rig.start(FUNCTIONS, api)
    assert process.stdin is not None
    assert process.stdout is not None
    seen: set[str] = set()
    base = launches = 0
    for line in process.stdout:
        name, stop, *value = line.split()
        if stop == "start":
            seen.add(name)
            base, launches = rig.driver.used, rig.driver.launches
        else:
            check_stop(rig, line, stop, base, launches)
        assert value in ([], [str(3 * GIB)]), line
        process.stdin.write("\n")
        process.stdin.flush()
    assert process.wait() == 0, process.stderr.read() if process.stderr else ""
    assert seen == set(NAMES[api])


def check_stop(rig: Any, line: str, stop: str, base: int, launches: int) -> None:
    used, driver = rig.used(), rig.driver.used
    if stop == "held":
        assert used == driver > base, (line, used, driver, base)
    elif stop == "freed":
        assert used == driver <= base, (line, used, driver, base)
    elif stop == "charged":
        assert (used, driver) == (base + SIZE, base), (line, used, driver, base)
    elif stop in ("launched", "done"):
        assert rig.driver.launches > launches, line
        slot = rig.region._layout.tenants[0].processes[0]
        assert slot.launched > 0
        assert stop == "launched" or slot.done == slot.launched, line
    else:
        assert stop == "shows", line


PROBE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
%(declarations)s
static int ours(const char *how, const char *name, void *found)
{
    Dl_info info;
    int good = found != NULL && dladdr(found, &info) && strstr(info.dli_fname, "libaimgpu") != NULL;
    if (!good)
        printf("%%s %%s\\n", how, name);
    return good;
}
int main(void)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *hip = dlopen("libamdhip64.so.7", RTLD_NOW), *found;
    (void)cuda, (void)hip, (void)found;
%(checks)s
    return 0;
}
"""


def test_every_function_is_found_by_every_lookup(rig: Any) -> None:
    """Linked directly, by dlsym of a handle, by dlsym of the default scope, and by the drivers' own lookups."""
    rig.admit()
    declarations = [f"extern int {name}();" for name, _, _ in HOOKS] + ["extern int cuGetProcAddress_v2();"]
    checks = []
    for name, api, version in HOOKS:
        handle = "hip" if api == "HIP" else "cuda"
        checks.append(f'ours("linked", "{name}", (void *){name});')
        checks.append(f'ours("dlsym", "{name}", dlsym({handle}, "{name}"));')
        checks.append(f'ours("default", "{name}", dlsym(RTLD_DEFAULT, "{name}"));')
        if api == "NVML":
            continue
        base = SUFFIX.sub("", name)
        flags = 2 if re.search("_ptsz|_ptds|_spt", name) else 0
        lookup = "hipGetProcAddress" if api == "HIP" else "cuGetProcAddress_v2"
        checks.append(
            f'found = NULL; {lookup}("{base}", &found, {max(int(version), 2000)}, (unsigned long){flags}, (void *)0); '
            f'ours("lookup", "{name}", found);'
        )
    source = PROBE % {"declarations": "\n".join(dict.fromkeys(declarations)), "checks": "\n".join(checks)}
    source = '#pragma GCC diagnostic ignored "-Wstrict-prototypes"\n' + source
    program = rig.tools.program("probe", link=("libcuda.so.1", "libamdhip64.so.7"), source=source)
    assert rig.run(program) == ""


def test_without_a_region_nothing_is_touched(rig: Any) -> None:
    """Loaded without a region, the library passes everything through."""
    rig.admit()
    environment = {**rig.environment(), "AIMGPU_REGION": ""}
    code = "from ctypes import *; t = c_size_t(); CDLL('libcuda.so.1').cuDeviceTotalMem_v2(byref(t), 0); print(t.value)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert (int(done.stdout), done.stderr) == (80 * GIB, "")
