"""What a recipe makes of a model that reads images."""

import pytest
from pictures import asked, model_directory, picture

from ratchet.config.loader import load_config
from ratchet.errors import DataError, ModelError
from ratchet.executors.freeze import freeze
from ratchet.models.transformers.multimodal_policy import MultimodalPolicy
from ratchet.training.from_config import build_policy

RECIPE = """\
model: {{path: {model}, train_encoders: {train_encoders}}}
device: cpu
threads: 1
media: {{max_side: 40}}
generator: {{kind: {generator}}}
environment: {{kind: sorting}}
algorithm: {{kind: sft}}
"""


def policy_of(tmp_path, model, train_encoders=True, generator="hf"):
    path = tmp_path / "r.yaml"
    path.write_text(
        RECIPE.format(model=model, train_encoders=train_encoders, generator=generator),
        encoding="utf-8",
    )
    return build_policy(freeze(load_config(path)))


@pytest.mark.medium
def test_it_brings_its_processor_and_the_limits_of_the_recipe(tmp_path):
    policy = policy_of(tmp_path, model_directory())
    assert isinstance(policy.model, MultimodalPolicy)
    assert policy.model.train_encoders
    assert (
        len(policy.renderer.media(policy.renderer.prompt([asked(picture(1))]), [asked(picture(1))]))
        == 1
    )
    with pytest.raises(DataError, match="48 x 32 pixels, at most 40 on a side"):
        policy.renderer.prompt([asked(picture(1, 48))])


@pytest.mark.medium
def test_the_engine_does_not_run_it(tmp_path):
    with pytest.raises(ModelError, match=r"set generator\.kind to hf"):
        policy_of(tmp_path, model_directory(), generator="engine")
