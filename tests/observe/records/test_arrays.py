"""Arrow arrays from their buffers are those that pyarrow makes, without pandas."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from ratchet.observe.records.arrays import make_array, read_array


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None, 3], pa.int32()),
        ([0.5, float("inf"), None], pa.float64()),
        ([True, None, False] * 5, pa.bool_()),
        (["é", None, "", "text"], pa.string()),
        ([], pa.string()),
        ([], pa.int64()),
        ([None, None], pa.string()),
    ],
)
def test_a_list_becomes_the_array_of_pyarrow(values, kind):
    made = make_array(values, kind)
    made.validate(full=True)
    assert made.equals(pa.array(values, kind))


def test_numpy_values_are_converted_and_read_again():
    made = make_array(np.array([0.1, 1e300, 2.0]), pa.float32(), np.array([False, False, True]))
    assert made.to_pylist() == [np.float32(0.1), float("inf"), None]
    for values in (np.arange(20), np.arange(20) % 3 == 0):
        array = make_array(values, pa.bool_() if values.dtype == bool else pa.int32())
        assert read_array(array).tolist() == values.tolist()
        assert read_array(array[3:11]).tolist() == values[3:11].tolist()


def test_half_a_surrogate_pair_is_no_text():
    with pytest.raises(UnicodeEncodeError):
        make_array(["\ud800"], pa.string())


@pytest.mark.medium
def test_pandas_is_not_imported():
    program = (
        "import pyarrow as pa, sys\n"
        "from ratchet.observe.records.arrays import make_array, read_array\n"
        "make_array(['a', None], pa.string())\n"
        "read_array(make_array([1, None], pa.int32()))\n"
        "assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
