"""Numbers of the command line that no command can compute with."""

import pytest
from typer.testing import CliRunner

from ratchet.cli.errors import WRONG_INPUT
from ratchet.cli.main import app

OPTIONS = [
    (["eval"], "--pass-threshold"),
    (["eval"], "--timeout-s"),
    (["plan"], "--probe"),
    (["train"], "--try"),
    (["watch"], "--every"),
    (["data", "swe-tasks"], "--timeout-s"),
]


@pytest.mark.parametrize("value", ["nan", "inf", "1e999"])
@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_options_that_are_no_finite_number_are_refused(command, option, value):
    result = CliRunner().invoke(app, [*command, "nothing", f"{option}={value}"])
    assert result.exit_code == WRONG_INPUT
    assert f"Invalid value for '{option}'" in result.output
