"""Import objects of users by `module:name` or by `path/file.py:name`.

A file needs no package and no entry on the import path: reward functions and environment classes
written for other libraries are often single files.
"""

from __future__ import annotations

import re
import sys
from difflib import get_close_matches
from hashlib import blake2b
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from ratchet.errors import ConfigError
from ratchet.utils.terminal_text import shorten_text

# "rewards/math.py:score"; group 1 is the file.
FILE_OBJECT = re.compile(r"([^\s:]+\.py):([A-Za-z_]\w*)")


def import_object(path: str) -> Any:
    """Import and return the object at an import path, or in a Python file.

    Raises ConfigError if the import fails or the module has no such name. Other errors in the
    user's module keep their traceback.

    Args:
        path: "my_pkg.module:name", or "path/file.py:name" relative to the current directory.
    """
    module, _, name = path.rpartition(":")
    is_file = FILE_OBJECT.fullmatch(path) is not None
    if not is_file and not all(part.isidentifier() for part in (*module.split("."), name)):
        raise ConfigError(
            f"{shorten_text(path, 200)!r} is not the path of a class or function: write it as "
            "my_pkg.module:Class, or path/file.py:Class"
        )
    try:
        loaded = _import_file(Path(module)) if is_file else import_module(module)
    except (ImportError, SyntaxError, OSError) as error:
        reason = f"{type(error).__name__}: {shorten_text(str(error), 500)}"
        advice = (
            "paths are relative to the current directory, or to the recipe's"
            if is_file
            else "is it installed, or in the current directory?"
        )
        raise ConfigError(f"'{path}' can't be imported ({reason}); {advice}") from error
    if not hasattr(loaded, name):
        near = get_close_matches(name, vars(loaded), n=1)
        raise ConfigError(
            f"module {module} has no '{name}'"
            + (f"; did you mean '{module}:{near[0]}'?" if near else "")
        )
    return getattr(loaded, name)


def _import_file(file: Path) -> ModuleType:
    """Return the module of a Python file, which is run once in a process.

    Its name in `sys.modules` contains a hash of its location. So a user's `math.py` does not shadow
    the standard library's, and two directories can each have a `rewards.py`.
    """
    location = str(file.resolve(strict=True))
    name = f"{file.stem}_{blake2b(location.encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, location)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
