"""Gives an interpreter the pretended accelerator when it imports torch: it has this folder on its
path, and imports this module before anything else."""

import sys
from importlib.abc import MetaPathFinder
from importlib.util import find_spec


class TorchFinder(MetaPathFinder):
    """A finder that loads the backend before torch is imported, and replaces `torch.cuda` after."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        from support.pretend_cuda import load_backend

        load_backend()
        spec = find_spec("torch")
        execute = spec.loader.exec_module

        def execute_and_install(module):
            execute(module)
            from support.pretend_cuda.devices import install

            install()

        spec.loader.exec_module = execute_and_install
        return spec


sys.meta_path.insert(0, TorchFinder())
