"""Forms of a function that are newer than this library: neither gets the wrapper of another form."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from aimgpu.units import GIB

DRIVER = """
#include <stdint.h>
#include <string.h>
int older, newer;
int cuMemAlloc_v2(uint64_t *pointer, unsigned long bytes) { return *pointer = bytes, older++, 0; }
int cuMemAlloc_v9(uint64_t *pointer, unsigned long bytes) { return *pointer = bytes, newer++, 0; }
static int next_form(uint64_t *pointer, unsigned long bytes, void *more) { return *pointer = bytes, newer += more == 0, 0; }
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, void *status)
{
    (void)flags, (void)status;
    if (strcmp(name, "cuMemAlloc") != 0)
        return 500;
    *(void **)found = version >= 14000 ? (void *)next_form : (void *)cuMemAlloc_v2;
    return 0;
}
"""
PROGRAM = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
def look(version):
    address = ctypes.c_void_p()
    code = lib.cuGetProcAddress_v2(b"cuMemAlloc", ctypes.byref(address), version, ctypes.c_uint64(0), None)
    return code, address.value
(first, old), (code, new), (again, same) = look(12000), look(14000), look(13060)
take = lambda at: ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)(at)
room = ctypes.c_uint64()
results = [take(old)(ctypes.addressof(room), 600 << 20, None) for _ in range(2)]
if new:
    take(new)(ctypes.addressof(room), 600 << 20, None)
results += [take(old)(ctypes.addressof(room), 600 << 20, None)]
print(first, code, old == same, *results, ctypes.c_int.in_dll(lib, "older").value, ctypes.c_int.in_dll(lib, "newer").value)
"""


@pytest.mark.parametrize(("fail", "printed"), [("closed", "0 500 True 0 2 2 1 0"), ("open", "0 0 True 0 2 2 1 1")])
def test_a_form_that_is_not_known_is_refused_or_passed_through(rig: Any, tmp_path: Path, fail: str, printed: str) -> None:
    """And the form that is known goes on being charged, whatever was looked up after it."""
    rig.admit(cap_bytes=1 * GIB)
    source, driver, program = tmp_path / "driver.c", tmp_path / "libcuda.so.1", tmp_path / "program.py"
    source.write_text(DRIVER)
    program.write_text(PROGRAM)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", driver, source], check=True)
    process = rig.start(program, driver, AIMGPU_FAIL=fail)
    out, err = process.communicate(timeout=60)
    assert out.strip() == printed, err
    assert "cuMemAlloc: the driver offers a newer form" in err


SYMBOL = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
code = lib.cuMemAlloc_v9(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(600 << 20))
print(code, ctypes.c_int.in_dll(lib, "newer").value)
"""


@pytest.mark.parametrize(("fail", "printed"), [("closed", "801 0"), ("open", "0 1")])
def test_so_is_the_symbol_of_such_a_form(rig: Any, tmp_path: Path, fail: str, printed: str) -> None:
    rig.admit(cap_bytes=1 * GIB)
    source, driver, program = tmp_path / "driver.c", tmp_path / "libcuda.so.1", tmp_path / "program.py"
    source.write_text(DRIVER)
    program.write_text(SYMBOL)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", driver, source], check=True)
    process = rig.start(program, driver, AIMGPU_FAIL=fail)
    out, err = process.communicate(timeout=60)
    assert out.strip() == printed, err
    assert "cuMemAlloc_v9: the driver offers a newer form" in err
