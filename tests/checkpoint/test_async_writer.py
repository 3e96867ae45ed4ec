import threading

import pytest
import torch

from ratchet.checkpoint.async_writer import BackgroundTask
from ratchet.checkpoint.serialization import defer_writes, load_state, save_state
from ratchet.errors import CheckpointError


def test_what_was_copied_is_written_though_the_originals_change(tmp_path):
    weights = torch.arange(6.0).view(2, 3)
    state = {
        "weights": weights,
        "tied": weights,
        "column": weights[:, 1],
        "moments": {0: (weights[0], 1.5)},
        "text": "a",
    }
    save_state(tmp_path / "at_once", state)
    with defer_writes() as writes:
        save_state(type(tmp_path)("later"), state)
    assert not (tmp_path / "later").exists()
    weights.fill_(-1)
    for write in writes:
        write(tmp_path)
    names = sorted(path.name for path in (tmp_path / "at_once").iterdir())
    assert names == ["state.json", "state.safetensors"]
    for name in names:
        assert (tmp_path / "at_once" / name).read_bytes() == (
            tmp_path / "later" / name
        ).read_bytes()
    assert torch.equal(load_state(tmp_path / "later")["column"], torch.tensor([1.0, 4.0]))


def test_it_goes_on_beside_and_what_it_raises_is_raised_once():
    background, goes_on = BackgroundTask(), threading.Event()
    assert not background.wait()
    background.begin(goes_on.wait)
    assert not background.has_finished
    goes_on.set()
    assert background.wait()

    def fail():
        raise CheckpointError("full")

    background.begin(fail)
    with pytest.raises(CheckpointError, match="full"):
        background.wait()
    assert not background.has_finished
    assert not background.wait()
