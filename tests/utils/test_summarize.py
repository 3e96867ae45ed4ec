import pytest

from ratchet.utils.summarize import summarize_names


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, ""),
        (1, "0"),
        (3, "0, 1, 2"),
        (4, "0, 1, 2 and 1 more"),
        (2000, "0, 1, 2 and 1,997 more"),
    ],
)
def test_the_first_names_and_the_number_of_others(count, text):
    assert summarize_names(map(str, range(count)), 3) == text
