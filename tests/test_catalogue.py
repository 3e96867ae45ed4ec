"""Every fault of the catalogue has a test, and the page lists them."""

import catalogue


def test_every_fault_has_a_test_and_every_mark_a_fault():
    marked = catalogue.marked()
    assert not set(catalogue.ROWS) - set(marked), "no test is marked with these"
    assert not set(marked) - set(catalogue.ROWS), "the catalogue has no such row"


def test_the_page_is_up_to_date():
    page = catalogue.PAGE.read_text(encoding="utf-8")
    assert page == catalogue.written(page, catalogue.marked()), (
        "write it anew: python tests/catalogue.py"
    )


def test_marks_are_read_from_the_source():
    source = (
        '@pytest.mark.slow\n@pytest.mark.fault("C1", "P2")\ndef test_x(): ...\n\nasync def '
        "test_y(): ...\n"
    )
    assert list(catalogue.marks(source)) == [("C1", "test_x"), ("P2", "test_x")]
