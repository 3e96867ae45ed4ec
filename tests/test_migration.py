"""The migration guide is as the importer's tables are."""

import migration


def test_the_page_is_up_to_date():
    text = migration.PAGE.read_text(encoding="utf-8")
    assert text == migration.page(text), "write it anew: python tests/migration.py"
    assert all(f"### {peer.title}" in text for peer in migration.PEERS.values())


def test_the_pages_for_users_of_one_library_are_up_to_date():
    pages = migration.peer_pages()
    stale = [path.name for path, text in pages.items() if text != path.read_text(encoding="utf-8")]
    assert stale == [], "write them anew: python tests/migration.py"
