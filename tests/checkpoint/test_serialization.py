"""State comes back bit for bit, in the same Python types; what can't is refused by name."""

from __future__ import annotations

import enum
import json
import math
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratchet.checkpoint.serialization import load_state, save_state
from ratchet.errors import CheckpointError
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.utils import failpoints

DTYPES = [
    *(
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex128,
        torch.complex64,
        torch.complex32,
    ),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
        torch.bool,
    ),
    *(
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    ),
    torch.float4_e2m1fn_x2,
]
OVERLAPPING = {
    "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
    "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
}


def round_trip(directory: Path, state: Any) -> Any:
    save_state(directory, state)
    return load_state(directory)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    elif isinstance(a, dict):
        assert list(map(repr, a)) == list(map(repr, b))  # the order and the types of keys too
        for x, y in zip(a.values(), b.values(), strict=True):
            assert_same(x, y)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3)], ids=str)
def test_every_dtype_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    count = math.prod(shape)
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(
        0,
        2 if dtype == torch.bool else 256,
        (count * dtype.itemsize,),
        generator=generator,
        dtype=torch.uint8,
    )
    tensor = raw.view(dtype).reshape(shape)  # every bit pattern, NaN payloads included
    assert_same(tensor, round_trip(tmp_path, {"x": tensor})["x"])


def test_views_shared_and_transposed_tensors(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "whole": base,
        "row": base[1],
        "column": base[:, 2],
        "t": base.t(),
        "again": base,
        "conj": torch.tensor([1 + 2j]).conj(),
    }
    loaded = round_trip(tmp_path, state)
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor), name
    loaded["row"].zero_()
    assert torch.equal(loaded["whole"], base)  # they came back apart


def test_loaded_tensors_do_not_hang_on_the_file(tmp_path: Path) -> None:
    loaded = round_trip(tmp_path, [torch.arange(4096.0)])[0]
    with (tmp_path / "state.safetensors").open("r+b") as file:
        file.write(bytes((tmp_path / "state.safetensors").stat().st_size))
    assert torch.equal(loaded, torch.arange(4096.0))


def test_parameters_are_saved_as_plain_tensors(tmp_path: Path) -> None:
    loaded = round_trip(tmp_path, torch.nn.Parameter(torch.ones(2)))
    assert type(loaded) is torch.Tensor
    assert not loaded.requires_grad


def test_an_optimizer_goes_on_bit_equal(tmp_path: Path) -> None:
    def fresh() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)

    def train(model: torch.nn.Linear, optimizer: torch.optim.AdamW, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(torch.full((2, 4), float(step + 1))).square().sum().backward()
            optimizer.step()

    whole = fresh()
    train(*whole, range(6))
    half = fresh()
    train(*half, range(3))
    save_state(tmp_path, {"model": half[0].state_dict(), "optimizer": half[1].state_dict()})
    model, optimizer = fresh()
    loaded = load_state(tmp_path)
    assert list(loaded["optimizer"]["state"]) == [0, 1]  # integer keys
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    train(model, optimizer, range(3, 6))
    assert_same(dict(whole[0].state_dict()), dict(model.state_dict()))
    assert_same(whole[1].state_dict()["state"], optimizer.state_dict()["state"])


def test_python_types_come_back(tmp_path: Path) -> None:
    state = {
        "none": None,
        "flags": [True, False, 0, 1],
        "big": 2**200,
        "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan],
        "text": ["", "ä\u2028\ud800", "$"],
        "tuple": (1, (2.0, [()])),
        "keys": {1: "int", "1": "str", 1.5: "float", None: "none", (1, "a"): "tuple"},
        "$": "float",
        "nested": {"$": {"$": "dict", "items": []}},
    }
    assert_same(state, round_trip(tmp_path, state))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.zeros((0, 3), dtype=np.uint32),
        np.array(["a", "bcd"]),
        np.array(7),
        np.float64(0.1),  # a subclass of float, and still not one
        np.float32("nan"),
        np.bool_(True),
        np.str_("x"),
    ],
    ids=repr,
)
def test_numpy(tmp_path: Path, value: np.ndarray | np.generic) -> None:
    loaded = round_trip(tmp_path, [value])[0]
    assert_same(value, loaded)
    if isinstance(loaded, np.ndarray):
        assert loaded.flags.writeable


def test_generators_continue(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
            torch.rand(3).tolist(),
        ]

    random.gauss(0, 1), np.random.randn()  # each keeps the second of a pair for its next call
    own = np.random.default_rng(3)
    save_state(
        tmp_path,
        {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "own": own.bit_generator.state,
        },
    )
    expected = draw(), own.random(4).tolist()
    other = np.random.default_rng(99)
    state = load_state(tmp_path)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    other.bit_generator.state = state["own"]
    assert (draw(), other.random(4).tolist()) == expected


# --- property

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_subnormal=True)
    | st.text(max_size=5)
    | st.sampled_from(["$", "dict", "tensor"])
)
tensors = st.builds(
    lambda dtype, shape, seed: torch.randint(
        0, 100, shape, generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    st.sampled_from(
        [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.float64]
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 1000),
)
keys = (
    st.text(max_size=3)
    | st.just("$")
    | st.integers()
    | st.booleans()
    | st.tuples(st.integers(), st.text(max_size=2))
)
nested = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


@given(nested)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_nesting_round_trips(tmp_path: Path, state: Any) -> None:
    assert_same(state, round_trip(tmp_path, state))


# --- refusals


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({1, 2}, "set"),
        (b"x", "bytes"),
        (Colour.RED, "Colour"),
        (object(), "object"),
        (np.array([{}], dtype=object), "ndarray"),
        (np.zeros(2, dtype=[("a", "i4")]), "ndarray"),
        (1j, "complex"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_what_would_come_back_as_something_else_is_refused_by_place(
    tmp_path: Path, value: Any, kind: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"^state\['buffer'\]\[2\]\[0\] is a {kind}\b"):
        save_state(tmp_path, {"buffer": [0, 1, (value,)]})
    assert list(tmp_path.iterdir()) == []


def overwrite(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(content)


def with_header(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def structure(value: Any) -> Callable[[Path], object]:
    return overwrite("state.json", json.dumps(value).encode())


@pytest.mark.parametrize(
    "damage",
    [
        lambda directory: (directory / "state.json").unlink(),
        lambda directory: (directory / "state.safetensors").unlink(),
        overwrite("state.json", b"{"),
        overwrite("state.json", b"\xff\xfe\xfa"),
        overwrite("state.safetensors", b""),
        overwrite("state.safetensors", struct.pack("<Q", 2**60) + b"{}"),
        overwrite("state.safetensors", struct.pack("<Q", 2) + b"{}trailing"),
        overwrite("state.safetensors", with_header(OVERLAPPING) + bytes(6)),
        structure({"$": "tensor", "name": "t9"}),
        structure({"$": "tensor"}),
        structure({"$": "exec", "value": "x"}),
        structure({"$": []}),
        structure({"$": "bytes", "name": "t0", "dtype": "load", "shape": [1]}),
        structure({"$": "bytes", "name": "t0", "dtype": "float64", "shape": [7]}),
        structure({"$": "array", "name": "t0", "dtype": "O", "shape": [1]}),
    ],
)
@pytest.mark.fault("S3")
def test_damage_is_a_checkpoint_error(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    save_state(tmp_path, {"x": torch.ones(2)})
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=r"'state' in .* can't be read"):
        load_state(tmp_path)


def test_several_states_share_a_directory(tmp_path: Path) -> None:
    save_state(tmp_path / "deep", {"a": torch.ones(1)}, name="policy")
    save_state(tmp_path / "deep", [1], name="loop")
    assert load_state(tmp_path / "deep", "policy")["a"].item() == 1
    assert load_state(tmp_path / "deep", "loop") == [1]


# --- with the store


def test_killed_between_the_two_files_the_previous_state_is_there(tmp_path: Path) -> None:
    code = """
import sys, torch
from pathlib import Path
from ratchet.utils import failpoints
from ratchet.checkpoint.serialization import save_state
from ratchet.runs.checkpoints import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]))
for step in (1, 2):
    if step == 2:
        failpoints.arm("checkpoint.between_files:kill")
    store.save(step, lambda directory: save_state(directory / "policy", {"x": torch.full((3,), step)}), {})
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == -9
    latest = CheckpointStore(tmp_path).latest()
    assert latest is not None
    assert load_state(latest.path / "policy")["x"].tolist() == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.fault("P10")
def test_a_file_system_that_is_really_full(tmp_path: Path) -> None:
    code = """
import resource, sys, torch
from pathlib import Path
from ratchet.checkpoint.serialization import save_state
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.errors import CheckpointError
store = CheckpointStore(Path(sys.argv[1]))
store.save(1, lambda directory: save_state(directory, {"x": torch.ones(10)}), {})
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
for write in (lambda save: save(Path(sys.argv[1] + "-alone")), lambda save: store.save(2, save, {})):
    try:
        write(lambda directory: save_state(directory, {"x": torch.ones(100_000)}))
    except CheckpointError as error:
        print(error)
"""
    root = tmp_path / "checkpoints"
    command = [sys.executable, "-c", code, str(root)]
    done = subprocess.run(
        command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert ["too large" in line for line in done.stdout.splitlines()] == [True, True]
    assert [path.name for path in root.iterdir()] == ["step-00000001"]
    assert CheckpointStore(root).latest() is not None


def test_an_armed_full_disk_between_the_files(tmp_path: Path) -> None:
    failpoints.arm("checkpoint.between_files:enospc")
    try:
        with pytest.raises(CheckpointError, match="No space left"):
            save_state(tmp_path, {})
    finally:
        failpoints.disarm()
