"""The pretended accelerator itself: it refuses and counts what CUDA refuses and waits for."""

import pytest
import torch
from support.pretend_cuda.counting import counting

from ratchet.utils.transfer import fetch_together, upload_together

CUDA = torch.device("cuda:0")


def test_values_and_gradients_are_the_cpus():
    def gradient(device):
        x = torch.linspace(-1, 1, 12, device=device).view(3, 4).requires_grad_()
        (x @ x.T).softmax(-1).pow(2).sum().backward()
        return x.grad

    assert gradient(CUDA).device == CUDA
    assert torch.equal(gradient(CUDA).cpu(), gradient("cpu"))


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_operands_on_several_devices_are_refused(other):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device=CUDA) + torch.ones(2, device=other)


def test_what_numpy_and_generators_of_the_cpu_refuse():
    x = torch.ones(2, device=CUDA)
    with pytest.raises(TypeError, match="can't convert cuda"):
        x.numpy()
    with pytest.raises(RuntimeError, match="'cuda' device type for generator"):
        x.uniform_(generator=torch.Generator())
    x.uniform_(generator=torch.Generator(CUDA))


def test_events_are_counted_by_line():
    x = torch.ones(4, device=CUDA)
    with counting() as events:
        y = x * 2 + 1
        y.view(2, 2)
        assert y.cpu().tolist() == [3.0] * 4
        y[0].item()
        y.nonzero()
        x.to("cpu", non_blocking=True)
    assert (events.count("kernel"), events.count("sync"), events.count("copy")) == (3, 3, 3)
    assert events.count("kernel", place="tests/rehearsal/cuda_backend.py") == 3


def test_tensors_cross_together_in_one_copy():
    tensors = [
        torch.arange(3),
        torch.ones(2, 2, dtype=torch.float64),
        torch.zeros(0),
        torch.tensor(True),
        torch.arange(10, dtype=torch.int16).view(2, 5).T,
    ]
    with counting() as events:
        on_device = upload_together(tensors, CUDA)
    assert (events.count("copy"), events.count("sync")) == (1, 0)
    with counting() as events:
        fetched = fetch_together(on_device)
    assert (events.count("copy"), events.count("sync")) == (1, 1)
    for tensor, result in zip(tensors, fetched, strict=True):
        assert result.dtype == tensor.dtype
        assert torch.equal(result, tensor)


def test_every_thread_has_a_current_device_and_every_device_its_memory():
    before = torch.cuda.memory_allocated(1)
    with torch.cuda.device(1):
        x = torch.ones(1024, device="cuda")
    assert x.device.index == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(1) - before == 4096


def test_visible_devices_are_those_of_the_environment(monkeypatch):
    assert torch.cuda.device_count() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert torch.cuda.device_count() == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not torch.cuda.is_available()
