"""However a program loads the driver, forks or becomes another program: its limits hold."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.native.conftest import Puppet

from aimgpu.isolation.building import find_loader
from aimgpu.isolation.region import Region, TenantLimits
from aimgpu.units import GIB, MIB

HIP_BY_NAME = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
codes = []
for _ in range(4):
    codes.append(lib.hipMalloc(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(400 << 20)))
print(*codes)
"""


def run_python(rig: Any, code: str, *arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    environment = {**rig.environment(), **more}
    command = [sys.executable, "-I", "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("name", ["libamdhip64.so.10", "libamdhip64.so.6.4.43482", "libamdhip64-0a1b2c3d.so.7"])
def test_a_driver_library_of_any_version_is_found_by_what_is_loaded(rig: Any, tmp_path: Path, name: str) -> None:
    """Loaded privately, as Python does, under a name that nobody has heard of."""
    rig.admit(cap_bytes=1 * GIB)
    shutil.copy(rig.tools.folder / "libamdhip64.so.7", tmp_path / name)
    done = run_python(rig, HIP_BY_NAME, str(tmp_path / name))
    assert done.stdout.split() == ["0", "0", "2", "2"], done.stderr
    assert rig.driver.used == 800 * MIB


def test_a_driver_library_under_another_name_is_asked_which_gpu_it_is(rig: Any, tmp_path: Path) -> None:
    """What the library itself asks of the driver is found there too, not only what the program looked up."""
    rig.driver.devices = 2
    regions = [
        Region.create(tmp_path / f"{gpu}.region", device_bytes=80 * GIB, device="GPU-" + f"a{gpu}" * 8) for gpu in (0, 1)
    ]
    for region in regions:
        region.admit(TenantLimits(name="tenant", cap_bytes=1 * GIB, rounding_bytes=1))
    shutil.copy(rig.tools.folder / "libamdhip64.so.7", tmp_path / "libamdhip64.so.10")
    more = {"AIMGPU_REGION": ":".join(str(region.path) for region in regions), "HIP_VISIBLE_DEVICES": "1"}
    done = run_python(rig, HIP_BY_NAME, str(tmp_path / "libamdhip64.so.10"), **more)
    assert done.stdout.split() == ["0", "0", "2", "2"], done.stderr
    assert [region.read_use()[0].peak_bytes for region in regions] == [0, 800 * MIB]
    for region in regions:
        region.close()


def test_a_function_whose_library_is_not_loaded_is_reported(rig: Any) -> None:
    rig.admit()
    done = run_python(rig, "import ctypes; print(ctypes.CDLL(None).hipMalloc(None, 1))")
    assert done.stdout == "801\n"
    assert "hipMalloc is called, but the library that provides it was not found" in done.stderr


PLUGIN = """
#include <stddef.h>
#include <stdint.h>
#ifdef BY_NAME
#define _GNU_SOURCE
#include <dlfcn.h>
int take(uint64_t *pointer, size_t bytes)
{
    int (*allocate)(uint64_t *, size_t);
    *(void **)&allocate = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemAlloc_v2");
    return allocate(pointer, bytes);
}
#else
int cuMemAlloc_v2(uint64_t *pointer, size_t bytes);
int take(uint64_t *pointer, size_t bytes) { return cuMemAlloc_v2(pointer, bytes); }
#endif
"""
HOST = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
int main(int count, char **words)
{
    void *plugin = strcmp(words[2], "deepbind") == 0 ? dlopen(words[1], RTLD_NOW | RTLD_DEEPBIND)
                                                     : dlmopen(LM_ID_NEWLM, words[1], RTLD_NOW);
    int (*take)(uint64_t *, size_t);
    uint64_t pointer;
    (void)count;
    if (plugin == NULL)
        return fprintf(stderr, "%s", dlerror()), 1;
    *(void **)&take = dlsym(plugin, "take");
    for (int i = 0; i < 4; i++)
        printf("%d ", take(&pointer, 400u << 20));
    return 0;
}
"""


@pytest.mark.parametrize("how", ["deepbind", "namespace"])
@pytest.mark.parametrize("form", ["linked", "by_name"])
def test_a_plugin_that_binds_deeply_or_elsewhere_is_held(rig: Any, tmp_path: Path, how: str, form: str) -> None:
    """RTLD_DEEPBIND, as plugin hosts use it, and dlmopen into a namespace of its own."""
    rig.admit(cap_bytes=1 * GIB)
    source, plugin = tmp_path / "plugin.c", tmp_path / "plugin.so"
    source.write_text(PLUGIN)
    extra = ["-DBY_NAME"] if form == "by_name" else [str(rig.tools.folder / "libcuda.so.1")]
    subprocess.run(["cc", "-shared", "-fPIC", "-o", plugin, source, *extra], check=True)
    process = rig.start(rig.tools.program("plugin_host", source=HOST), plugin, how)
    out, err = process.communicate(timeout=60)
    assert out.split() == ["0", "0", "2", "2"], err
    assert rig.driver.used == 800 * MIB
    assert ("dlmopen" in err) == (how == "namespace")


def test_a_plain_dlopen_still_finds_libraries_beside_the_caller(rig: Any, tmp_path: Path) -> None:
    """The run path of the calling library counts, not that of ours."""
    rig.admit()
    (tmp_path / "lib").mkdir()
    (tmp_path / "inner.c").write_text("int answer(void) { return 42; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "lib/libinner.so", tmp_path / "inner.c"], check=True)
    source = """
#include <dlfcn.h>
#include <stdio.h>
int main(void)
{
    void *inner = dlopen("libinner.so", RTLD_NOW);
    int (*answer)(void);
    if (inner == NULL)
        return puts(dlerror()), 1;
    *(void **)&answer = dlsym(inner, "answer");
    printf("%d", answer());
    return 0;
}
"""
    (tmp_path / "outer.c").write_text(source)
    subprocess.run(["cc", "-o", tmp_path / "outer", tmp_path / "outer.c", "-Wl,-rpath,$ORIGIN/lib", "-ldl"], check=True)
    assert rig.run(tmp_path / "outer") == "42"


def test_a_fork_at_any_moment_is_safe(rig: Any) -> None:
    """Other threads allocate, and grow the library's tables, while children are made; each child allocates at once."""
    rig.admit(cap_bytes=1 * GIB)
    assert Puppet(rig, "tenant").do("fork_while_allocating 60") == 0


FORKS_IN_FREE = """
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
int cuMemAlloc_v2(uint64_t *pointer, size_t bytes);
int cuMemFree_v2(uint64_t pointer);
void __libc_free(void *pointer);
static int armed, children, failed, forking, freed_by_child;
static pid_t parent;
void free(void *pointer)
{
    freed_by_child += forking && getpid() != parent;
    if (armed && pointer != NULL && malloc_usable_size(pointer) >= 256 * sizeof(void *)) {
        armed = 0;
        forking = 1;
        pid_t child = fork();
        forking = 0;
        if (child == 0) {
            uint64_t own;
            alarm(60);
            _exit(freed_by_child != 0 || cuMemAlloc_v2(&own, 1) != 0 || cuMemFree_v2(own) != 0);
        }
        int status = -1;
        waitpid(child, &status, 0);
        children++;
        failed += status != 0;
        armed = 1;
    }
    __libc_free(pointer);
}
int main(void)
{
    uint64_t pointer;
    parent = getpid();
    armed = 1;
    for (int i = 0; i < 2000; i++)
        cuMemAlloc_v2(&pointer, 1);
    armed = 0;
    printf("%d %d", children > 0, failed);
    return 0;
}
"""


def test_a_fork_while_the_librarys_tables_grow_is_safe(rig: Any) -> None:
    """The child finds the tables half moved and their lock taken: it forgets them, and neither reads nor frees them."""
    rig.admit(cap_bytes=1 * GIB)
    program = rig.tools.program("forks_in_free", link=("libcuda.so.1",), source=FORKS_IN_FREE)
    assert rig.run(program) == "1 0"


def test_a_program_that_becomes_one_without_a_gpu_gives_its_memory_back(rig: Any) -> None:
    rig.admit(cap_bytes=1 * GIB)
    code = (
        "import ctypes, os, sys\n"
        "ctypes.CDLL('libcuda.so.1').cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(400 << 20))\n"
        "os.execv('/bin/sh', ['sh', '-c', 'echo ready; read line'])"
    )
    environment = rig.environment()
    command = [sys.executable, "-I", "-c", code]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert rig.used() == 0
        process.kill()


def test_a_program_that_becomes_another_with_an_empty_environment_gives_its_memory_back(rig: Any) -> None:
    """The library is gone with the variables, and the process number is the same: the lock for life is free."""
    rig.admit(cap_bytes=1 * GIB)
    code = (
        "import ctypes, os, sys\n"
        "ctypes.CDLL('libcuda.so.1').cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(600 << 20))\n"
        "os.execve('/bin/sh', ['sh', '-c', 'echo ready; read line'], {})"
    )
    command = [sys.executable, "-I", "-c", code]
    with subprocess.Popen(command, env=rig.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        rig.driver.used = 0  # the driver's connection ended with the program
        assert Puppet(rig, "tenant").do("allocate 600") == 0
        assert rig.region.reap() == 0
        assert rig.used() == 600 << 20
        process.kill()


CLOSES = """
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>
int cuMemAlloc_v2(uint64_t *pointer, size_t bytes);
int main(int count, char **words)
{
    uint64_t pointer;
    int forks = count > 1 && words[1][0] == 'f', code;
    if (forks && fork() != 0)
        return getchar();
    code = cuMemAlloc_v2(&pointer, 600u << 20);
    for (int i = 3; i < 1024; i++)
        close(i);
    printf("%d\\n", code);
    fflush(stdout);
    return getchar();
}
"""


@pytest.mark.parametrize("how", ["plain", "fork"])
def test_a_program_that_closes_every_descriptor_is_alive(rig: Any, how: str) -> None:
    """Also a child of a fork: its lock for life stays with the mapping of the region."""
    rig.admit(cap_bytes=1 * GIB)
    process = rig.start(rig.tools.program("closes", link=("libcuda.so.1",), source=CLOSES), how)
    assert process.stdout.readline() == "0\n"
    assert rig.region.reap() == 0
    assert rig.used() == 600 << 20
    assert Puppet(rig, "tenant").do("allocate 600") == 2


EARLY = """
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
int cuMemAlloc_v2(uint64_t *pointer, size_t bytes);
int codes[4];
#ifdef EMPTIES
__attribute__((constructor(101))) static void empty(void) { clearenv(); }
#endif
__attribute__((constructor)) static void early(void)
{
    uint64_t pointer;
    for (int i = 0; i < 4; i++)
        codes[i] = cuMemAlloc_v2(&pointer, 400u << 20);
}
"""
SAYS_CODES = """
#include <stdint.h>
#include <stdio.h>
int cuMemAlloc_v2(uint64_t *pointer, size_t bytes);
extern int codes[4];
#ifdef PREINIT
int codes[4];
static void early(void)
{
    uint64_t pointer;
    for (int i = 0; i < 4; i++)
        codes[i] = cuMemAlloc_v2(&pointer, 400u << 20);
}
__attribute__((section(".preinit_array"), used)) static void (*const first)(void) = early;
#endif
int main(void)
{
    uint64_t pointer;
    for (int i = 0; i < 4; i++)
        printf("%d ", codes[i]);
    return printf("%d", cuMemAlloc_v2(&pointer, 400u << 20)) < 0;
}
"""
EARLY_KINDS = {
    "a constructor": (),
    "a constructor that empties the environment": ("-DEMPTIES",),
    "before the C library has the environment": ("-Wl,-z,initfirst",),
    "before all constructors": ("-DPREINIT",),
}


@pytest.mark.parametrize("kind", EARLY_KINDS)
def test_what_is_allocated_before_the_program_begins_is_charged(rig: Any, tmp_path: Path, kind: str) -> None:
    """Linked libraries are initialised before preloaded ones; objects of C++ allocate in their constructors."""
    rig.admit(cap_bytes=1 * GIB)
    driver, library, program = rig.tools.folder / "libcuda.so.1", tmp_path / "libearly.so", tmp_path / "program"
    for name, text in (("early.c", EARLY), ("program.c", SAYS_CODES)):
        (tmp_path / name).write_text(text)
    flags = EARLY_KINDS[kind]
    subprocess.run(["cc", "-shared", "-fPIC", *flags, "-o", library, tmp_path / "early.c", driver], check=True)
    linked = [driver] if kind == "before all constructors" else [library, driver, f"-Wl,-rpath,{tmp_path}"]
    subprocess.run(["cc", *flags, "-o", program, tmp_path / "program.c", *linked], check=True)
    assert rig.run(program).split() == ["0", "0", "2", "2", "2"]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_a_child_with_an_empty_environment_is_held_as_the_first_process_of_its_container(rig: Any) -> None:
    """There /etc/ld.so.preload has every program load the library."""
    rig.admit(cap_bytes=512 << 20)
    program = rig.tools.program("closes", link=("libcuda.so.1",), source=CLOSES)
    child = f"env -i {find_loader()} --preload {rig.tools.interposer} {program}"
    command = ["unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", f"{child}; true"]
    done = subprocess.run(
        command, env=rig.environment(LD_PRELOAD=""), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert done.stdout == "2\n", done.stderr


def test_a_function_that_is_looked_up_by_its_version_is_held(rig: Any, tmp_path: Path) -> None:
    """dlvsym, as some wrappers of HIP use it: hipMalloc of hip_4.2."""
    rig.admit(cap_bytes=1 * GIB)
    for name, text in {
        "driver.map": "hip_4.2 { global: hipMalloc; local: *; };",
        "driver.c": "int hipMalloc(void **pointer, unsigned long bytes) { return *pointer = (void *)bytes, 0; }",
    }.items():
        (tmp_path / name).write_text(text)
    driver = tmp_path / "libamdhip64.so.7"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", driver, tmp_path / "driver.c", f"-Wl,--version-script={tmp_path / 'driver.map'}"],
        check=True,
    )
    source = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **words)
{
    void *library = dlopen(words[count - 1], RTLD_NOW), *pointer;
    int (*allocate)(void **, unsigned long);
    *(void **)&allocate = dlvsym(library, "hipMalloc", "hip_4.2");
    for (int i = 0; i < 4; i++)
        printf("%d ", allocate(&pointer, 400u << 20));
    printf("%d", dlvsym(library, "hipNothing", "hip_4.2") == NULL);
    return 0;
}
"""
    assert rig.run(rig.tools.program("by_version", source=source), driver).split() == ["0", "0", "2", "2", "1"]


@pytest.mark.parametrize(
    "call",
    [
        *("cuLaunchKernelEx", "cuMemCreate", "cuGetProcAddress", "cuLaunchCooperativeKernelMultiDevice"),
        *("cuGraphAddMemAllocNode", "cuArrayCreate", "cuArrayCreate_v2", "cuArray3DCreate_v2", "cuMipmappedArrayCreate"),
    ],
)
def test_null_pointers_reach_the_driver(rig: Any, tmp_path: Path, call: str) -> None:
    """What the driver would answer with an error does not crash in the library."""
    rig.admit()
    driver = tmp_path / "libcuda.so.1"
    (tmp_path / "driver.c").write_text(f"int {call}(void *a, void *b) {{ return a == 0 || b == 0 ? 1 : 0; }}")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", driver, tmp_path / "driver.c"], check=True)
    code = f"import ctypes; print(ctypes.CDLL({str(driver)!r}).{call}(None, None, None, None, None))"
    done = run_python(rig, code, LD_LIBRARY_PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "1\n"), (done.stderr, os.WTERMSIG)


LATER = """
import ctypes, os, sys
own, lib = ctypes.CDLL(None), ctypes.CDLL("libcuda.so.1")
def allocate():
    return lib.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(400 << 20))
before = [allocate() for _ in range(int(sys.argv[2]))]
ends, its = os.pipe()
if os.fork() == 0:
    os.environ["AIMGPU_REGION"] = sys.argv[1]
    attached = own.aimgpu_attach()
    codes = [allocate() for _ in range(4)]
    again = own.aimgpu_attach()
    if os.fork() == 0:
        codes.append(allocate())
        os.write(its, " ".join(map(str, [*before, attached, *codes, again])).encode())
        os._exit(0)
    os.wait()
    os._exit(0)
os.wait()
print(os.read(ends, 1000).decode())
"""


def test_a_prepared_process_may_not_use_the_driver_and_its_child_is_held_from_its_first_call(rig: Any) -> None:
    """Its own child after that is held too, by the same cap."""
    rig.admit(cap_bytes=1 * GIB)
    done = run_python(rig, LATER, str(rig.region.path), "0", AIMGPU_REGION="later")
    assert done.stdout.split() == ["0", "0", "0", "2", "2", "2", "1"], done.stderr


def test_a_prepared_process_that_called_the_driver_cannot_be_attached(rig: Any) -> None:
    """What it did is counted nowhere, so its children get nothing either."""
    rig.admit(cap_bytes=1 * GIB)
    done = run_python(rig, LATER, str(rig.region.path), "1", AIMGPU_REGION="later")
    refused, attached, *codes, again = done.stdout.split()
    assert refused != "0"
    assert (attached, again) == ("1", "1")
    assert "0" not in codes
    assert rig.driver.used == 0


def test_a_region_that_cannot_be_opened_is_refused_at_attach_as_at_load(rig: Any) -> None:
    done = run_python(rig, LATER, str(rig.region.path) + ".none", "0", AIMGPU_REGION="later")
    attached, *codes, _ = done.stdout.split()
    assert attached == "0"
    assert "0" not in codes
    assert rig.driver.used == 0
