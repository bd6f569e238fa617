from slug import slug


def test_words_are_joined_by_dashes():
    assert slug("  Fast   Forks ") == "fast-forks"


def test_one_word_stays_one():
    assert slug("Forks") == "forks"
