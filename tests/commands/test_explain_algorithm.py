"""`ratchet explain-algorithm` shows what a run would build."""

import pytest
from typer.testing import CliRunner

from ratchet.cli.main import app
from ratchet.commands.explain_algorithm import SOURCE, explain_algorithm
from ratchet.config.registry import KINDS
from ratchet.errors import ConfigError


@pytest.mark.parametrize("kind", KINDS["algorithm"])
def test_every_algorithm_shows_a_loss_and_a_source(kind):
    page = explain_algorithm(kind)
    assert page.startswith(f"{kind}: ")
    loss = page.split("Loss, minimised")[1].split("Keys")[0]
    assert "aggregated by " in loss
    assert SOURCE.search(page)
    assert max(map(len, page.splitlines())) <= 100


def test_the_page_follows_the_keys():
    plain, page = (explain_algorithm("grpo", keys) for keys in ([], ["kl.coef=0.04", "epochs=2"]))
    assert "kl_penalty" not in plain
    assert "policy, 0.04 x kl:" in page
    assert "optimizer steps a batch: 2" in page
    assert "ref_logprobs: logprobs of the reference" in page


def test_a_wrong_name_or_key_is_explained():
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        explain_algorithm("grpoo")
    with pytest.raises(ConfigError, match="group_size"):
        explain_algorithm("grpo", ["grup_size=4"])
    outcome = CliRunner().invoke(app, ["explain-algorithm", "gspo"])
    assert "exp(mean over the row of log r_t)" in " ".join(outcome.output.split())
