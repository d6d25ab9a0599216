"""The glossary: every word stands in the chapter that is said to introduce it, once, in order, and nothing is stale."""

import re

import glossary

TERMS = glossary.terms()


def test_every_word_occurs_in_the_chapter_that_introduces_it():
    missing = [term["word"] for term in TERMS if glossary.heading_of(term) is None]
    assert not missing
    assert glossary.heading_of({"word": "hyperloop", "chapter": "03_zero"}) is None


def test_no_earlier_chapter_has_a_word_in_its_title_that_a_later_one_introduces():
    titles = {
        folder.name: (folder / "README.md").read_text().splitlines()[0] for folder in glossary.ROOT.glob("[01]*_*")
    }
    for term in TERMS:
        named = {chapter for chapter, title in titles.items() if re.search(rf"\b{re.escape(term['word'])}\b", title)}
        assert not named or term["chapter"] in named, (term["word"], named)


def test_words_are_there_once_and_in_order():
    words = [term["word"].lower() for term in TERMS]
    order = [word.replace("1f1b", "one forward") for word in words]
    assert order == sorted(order)
    assert len(set(words)) == len(words)


def test_every_entry_is_whole_and_fits_in_a_table():
    for term in TERMS:
        assert term.keys() - {"seen"} == {"word", "also", "meaning", "chapter"}, term
        assert not [text for text in term.values() if "\n" in text], term
        assert "|" not in term["word"] + term["also"] + term["meaning"], term
        assert term["meaning"].endswith("."), term


def test_headings_are_found_outside_of_code_only():
    text = "# A\nx\n```\n# no heading\n```\n## B `b`\nword\n"
    assert [heading for heading, _ in glossary.sections(text)] == ["", "A", "B `b`"]


def test_the_page_in_the_repository_is_the_one_that_is_made_now():
    assert glossary.PAGE.read_text() == glossary.page(), "run python book/glossary.py"
