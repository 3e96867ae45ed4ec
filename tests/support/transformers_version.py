"""What tests need of transformers that the lowest version which Ratchet takes doesn't have."""

from importlib.metadata import version
from importlib.util import find_spec

from packaging.version import Version

TRANSFORMERS = Version(version("transformers"))
READS_IMAGES = Version("5.18") <= TRANSFORMERS or find_spec("torchvision") is not None
NEEDS_TORCHVISION = "before 5.18 the image processors of transformers need torchvision"
