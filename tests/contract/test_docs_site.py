"""The navigation of the documentation's web site, and llms.txt, have every page."""

from __future__ import annotations

from tests.support.docs import ROOT
from tools import build_site, gen_llms


def test_every_page_for_users_is_in_the_navigation_once() -> None:
    docs = ROOT / "docs"
    there = {str(path.relative_to(ROOT)) for path in docs.rglob("*.md") if "adr" not in path.parts}
    named = gen_llms.pages()

    assert len(set(named)) == len(named)
    assert sorted(there - set(named)) == []
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_llms_txt_has_a_sentence_for_each_page() -> None:
    for name in gen_llms.pages():
        sentence = gen_llms.first_sentence(name)
        assert f"({name}): {sentence}\n" in gen_llms.text()
        assert len(sentence.split()) > 2


def test_the_site_has_each_page_and_each_picture_under_its_own_path() -> None:
    sources = build_site.sources()

    assert {ROOT / name for name in gen_llms.pages()} <= set(sources)
    assert ROOT / "docs/assets/fork.svg" in sources


def test_a_block_with_a_second_word_begins_as_the_site_knows_it() -> None:
    page = "```python test\nx\n```\n\n```toml recipe\n```\n\n```sh\n```\n"

    assert (
        build_site.FENCE.sub(r"```\1", page) == "```python\nx\n```\n\n```toml\n```\n\n```sh\n```\n"
    )
