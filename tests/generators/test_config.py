import subprocess
import sys
from importlib import import_module

import pytest
from pydantic import ValidationError

from ratchet.generators.config import EngineConfig, HFConfig


@pytest.mark.parametrize("section", [EngineConfig, HFConfig])
def test_a_section_names_what_it_builds(section):
    module, _, name = section.builds.partition(":")
    assert isinstance(getattr(import_module(module), name), type)


@pytest.mark.parametrize(
    "wrong", [{"max_running": 0}, {"kv_cache_gib": 0.0}, {"row_multiple": 0}, {"slots": 4}]
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValidationError):
        EngineConfig(**wrong)


@pytest.mark.medium
def test_the_sections_need_no_torch_and_the_generators_no_transformers():
    code = (
        "import sys; import ratchet.generators.config; assert 'torch' not in sys.modules;"
        "import ratchet.generators.engine.engine, ratchet.generators.hf; assert 'transformers' not "
        "in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
