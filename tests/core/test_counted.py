"""Texts with numbers."""

from rollmill.core.text import format_count


def test_a_number_has_its_noun_in_the_singular_or_the_plural():
    assert [format_count(number, "trial") for number in (0, 1, 1_200)] == ["0 trials", "1 trial", "1,200 trials"]
    processes = [format_count(number, "more process", "more processes") for number in (1, 3)]
    assert processes == ["1 more process", "3 more processes"]
