"""Let a process and its children import a torchvision whose compiled part belongs to another torch.

Put this directory and torchvision's own on PYTHONPATH. transformers' processors of images and videos
use none of the compiled operators, but torchvision declares facts about them when it is imported.
"""

import sys
import types


class BeforeTorchvision:
    """It declares the operator that torchvision expects, just before torchvision is imported."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            sys.modules["torchvision._meta_registrations"] = types.ModuleType("no operators")
            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            libraries.append(library)  # it would be undone with the object


libraries = []
sys.meta_path.insert(0, BeforeTorchvision())
