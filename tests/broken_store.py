"""A store that fails as a test says: fsspec's memory under broken://, with every operation told
beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

Told = Callable[[str, str], None]  # (operation, path)


class Broken(MemoryFileSystem):
    protocol = "broken"
    store: dict = {}  # noqa: RUF012 - as in the class above it
    pseudo_dirs = [""]  # noqa: RUF012
    told: Told = staticmethod(lambda operation, path: None)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("broken://", "memory://"))

    def put_file(self, lpath, rpath, **kwargs):
        with open(lpath, "rb") as file:
            self.pipe_file(rpath, file.read())

    def pipe_file(self, path, value, **kwargs):
        try:
            type(self).told("write", path)
        except PermissionError:
            raise
        except BaseException:
            # Object stores replace a file as a whole; of a new one this is more than a broken
            # connection would leave.
            if not self.exists(path):
                super().pipe_file(path, value[: len(value) // 2])
            raise
        super().pipe_file(path, value)

    def get_file(self, rpath, lpath, **kwargs):
        type(self).told("read", rpath)
        super().get_file(rpath, lpath, **kwargs)

    def cat_file(self, path, **kwargs):
        type(self).told("read", path)
        return super().cat_file(path, **kwargs)

    def find(self, path, **kwargs):
        type(self).told("list", path)
        return super().find(path, **kwargs)

    def rm_file(self, path):
        type(self).told("remove", path)
        super().rm_file(path)


fsspec.register_implementation("broken", Broken, clobber=True)


@contextmanager
def telling(told: Told) -> Iterator[None]:
    Broken.told = staticmethod(told)
    try:
        yield
    finally:
        Broken.told = staticmethod(lambda operation, path: None)


def contents(address: str) -> dict[str, bytes]:
    """All that is at an address, by name."""
    system, root = fsspec.core.url_to_fs(address)
    system.invalidate_cache()
    return {
        path.removeprefix(root).lstrip("/"): system.cat_file(path) for path in system.find(root)
    }
