"""The emulated kernel's files as a real file system, so that programs which are not ours can read and write them.

Speaks the kernel's FUSE protocol (version 7.31, linux/fuse.h) on /dev/fuse: no library is needed, only root. Files are opened
for direct I/O: every read is answered by the kernel as it is then, and every write reaches it as one piece, as in sysfs.
"""

import ctypes
import errno
import os
import select
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.hardware.emulation.kernel import WRITABLE, EmulatedKernel
from tests.hardware.emulation.sysfs_tree import Link, relative_target

_IN_HEADER = struct.Struct("<IIQQIIII")
_OUT_HEADER = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_BUFFER_BYTES = 1 << 18
_WRITE_BYTES = 1 << 17
_DIRECT_IO = 1
_DETACH = 2
_NO_REPLY = (2, 36, 42)  # FORGET, INTERRUPT, BATCH_FORGET


@contextmanager
def mounted(kernel: EmulatedKernel, place: Path) -> Iterator[Path]:
    """The tree at `place` until the block ends. Needs root and /dev/fuse."""
    place.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    try:
        if libc.mount(b"aimgpu-sys", str(place).encode(), b"fuse", 0, options) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        stop, stopping = os.pipe()
        thread = threading.Thread(target=_FileSystem(kernel, descriptor, stop).serve, daemon=True)
        thread.start()
        try:
            yield place
        finally:
            # Another mount namespace may still hold the mount, so the thread is told to stop, not left to find out.
            libc.umount2(str(place).encode(), _DETACH)
            os.close(stopping)
            thread.join()
            os.close(stop)
    finally:
        os.close(descriptor)


class _FileSystem:
    def __init__(self, kernel: EmulatedKernel, descriptor: int, stop: int) -> None:
        self._kernel = kernel
        self._descriptor = descriptor
        self._stop = stop
        self._paths = {1: ""}
        self._ids = {"": 1}
        self._answers: dict[int, Callable[[str, bytes], bytes]] = {
            1: self._lookup,
            3: self._getattr,
            4: self._getattr,  # SETATTR: sysfs ignores truncation
            5: self._readlink,
            14: self._open,
            15: self._read,
            16: self._write,
            17: lambda _path, _body: struct.pack("<5Q4I6I", *([0] * 5), 4096, 255, 4096, 0, *([0] * 6)),
            18: _nothing,
            20: _nothing,
            25: _nothing,
            26: self._init,
            27: self._open,
            28: self._readdir,
            29: _nothing,
            34: _nothing,
        }

    def serve(self) -> None:
        os.set_blocking(self._descriptor, False)
        while self._stop not in select.select([self._descriptor, self._stop], [], [])[0]:
            try:
                request = os.read(self._descriptor, _BUFFER_BYTES)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                return  # ENODEV: unmounted
            opcode, unique, node = _IN_HEADER.unpack_from(request)[1:4]
            if opcode in _NO_REPLY:
                continue
            code, body = self._answer(opcode, node, request[_IN_HEADER.size :])
            try:
                os.write(self._descriptor, _OUT_HEADER.pack(_OUT_HEADER.size + len(body), code, unique) + body)
            except OSError:  # the asker was killed meanwhile
                continue

    def _answer(self, opcode: int, node: int, body: bytes) -> tuple[int, bytes]:
        handler = self._answers.get(opcode)
        if handler is None:
            return -errno.ENOSYS, b""
        try:
            return 0, handler(self._paths.get(node, ""), body)
        except OSError as error:
            return -(error.errno or errno.EIO), b""

    def _init(self, _: str, body: bytes) -> bytes:
        minor, readahead = struct.unpack_from("<2I", body, 4)
        return struct.pack("<4I2H2I2H8I", 7, min(minor, 31), readahead, 0, 12, 10, _WRITE_BYTES, 1, 32, 0, *([0] * 8))

    def _lookup(self, path: str, body: bytes) -> bytes:
        name = body.rstrip(b"\0").decode()
        child = f"{path}/{name}" if path else name
        attributes = self._attributes(child)
        return struct.pack("<4Q2I", self._ids[child], 0, 0, 0, 0, 0) + attributes

    def _getattr(self, path: str, _: bytes) -> bytes:
        return struct.pack("<Q2I", 0, 0, 0) + self._attributes(path)

    def _attributes(self, path: str) -> bytes:
        kind = self._kind(path)
        if path not in self._ids:
            self._ids[path] = len(self._ids) + 1
            self._paths[self._ids[path]] = path
        name = path.rpartition("/")[2]
        mode = {stat.S_IFDIR: 0o755, stat.S_IFLNK: 0o777, stat.S_IFREG: 0o644 if name in WRITABLE else 0o444}[kind]
        size = 0 if kind == stat.S_IFDIR else 4096
        return _ATTR.pack(self._ids[path], size, 8, 0, 0, 0, 0, 0, 0, kind | mode, 1, 0, 0, 0, 4096, 0)

    def _kind(self, path: str) -> int:
        tree = self._kernel.tree
        if path in tree:
            content = tree[path]
            return stat.S_IFDIR if content is None else stat.S_IFLNK if isinstance(content, Link) else stat.S_IFREG
        if path in self._kernel.directories:
            return stat.S_IFDIR
        raise OSError(errno.ENOENT, path)

    def _readlink(self, path: str, _: bytes) -> bytes:
        content = self._kernel.tree.get(path)
        if not isinstance(content, Link):
            raise OSError(errno.EINVAL, path)
        return relative_target(path, content).encode()

    def _open(self, path: str, _: bytes) -> bytes:
        return struct.pack("<QIi", 0, _DIRECT_IO if self._kind(path) == stat.S_IFREG else 0, 0)

    def _read(self, path: str, body: bytes) -> bytes:
        offset, size = struct.unpack_from("<QI", body, 8)
        content = self._kernel.tree.get(path)
        return content.encode()[offset : offset + size] if isinstance(content, str) else b""

    def _write(self, path: str, body: bytes) -> bytes:
        (size,) = struct.unpack_from("<I", body, 16)
        self._kernel.write(path, body[40 : 40 + size].decode(errors="replace"))
        return struct.pack("<2I", size, 0)

    def _readdir(self, path: str, body: bytes) -> bytes:
        offset, size = struct.unpack_from("<QI", body, 8)
        prefix = f"{path}/" if path else ""
        names = sorted(self._kernel.directories.get(path, ()))
        out = b""
        for position, name in enumerate(names[offset:], offset + 1):
            kind = self._kind(prefix + name) >> 12
            entry = struct.pack("<QQII", position + 1, position, len(name.encode()), kind) + name.encode()
            entry += b"\0" * (-len(entry) % 8)
            if len(out) + len(entry) > size:
                break
            out += entry
        return out


def _nothing(_path: str, _body: bytes) -> bytes:
    return b""
