from hypothesis import given
from hypothesis import strategies as st

from ratchet.generators.engine.stop_strings import SHORTEST_WINDOW, StopStrings


class Words:
    """Token i is the i-th word."""

    def __init__(self, *words):
        self.words = words

    def decode(self, ids):
        return "".join(self.words[i] for i in ids)


class Utf8:
    """A token is a byte; the decoder of a text drops a space in front, as SentencePiece's do."""

    def decode(self, ids):
        return bytes(ids).decode("utf-8", errors="replace").removeprefix(" ")


def test_a_string_is_found_across_tokens_and_within_one():
    watch = StopStrings(["</end>"], Words("<", "/en", "d>", "x</end>y"))
    assert [watch.feed(token) for token in (0, 1, 0, 1, 2)] == [False, False, False, False, True]
    assert StopStrings(["</end>"], Words("<", "/en", "d>", "x</end>y")).feed(3)


def test_any_of_several_strings_ends():
    watch = StopStrings(["\n\n", "Q:"], Words("a", "\n", "Q", ":"))
    assert [watch.feed(token) for token in (0, 1, 2, 3)] == [False, False, False, True]


def test_a_character_of_several_tokens_counts_from_its_last_one():
    watch = StopStrings(["é"], Utf8())
    assert [watch.feed(byte) for byte in "é".encode()] == [False, True]


@given(st.text(alphabet="ab c", max_size=200), st.sampled_from(["abc", " c", "ccc", "a", "b b"]))
def test_windows_change_nothing(text, stop):
    """Token by token equals a search in the whole text, however often the window was cut."""
    decoder, data = Utf8(), text.encode()
    watch = StopStrings([stop], decoder)
    for count in range(1, len(data) + 1):
        expected = stop in decoder.decode(list(data[:count]))
        assert watch.feed(data[count - 1]) == expected
        assert len(watch.window) <= SHORTEST_WINDOW + 2 * watch.min_window_characters
        if expected:
            break


def test_empty_pieces_keep_the_window_until_there_is_text():
    watch = StopStrings(["ab"], Words("", "a", "b"))
    assert not watch.feed(1)
    assert not any(watch.feed(0) for _ in range(100))
    assert watch.feed(2)
