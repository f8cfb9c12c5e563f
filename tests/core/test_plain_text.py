"""Text for people."""

from rollmill.core.text import MAX_MESSAGE, shorten_message


def test_a_message_that_is_too_long_keeps_its_beginning_and_its_end():
    assert shorten_message("short") == "short"
    long = "unknown recipe '" + "x" * 100_000 + "'. hint: `rollmill list` shows them."
    short = shorten_message(long)
    assert short.startswith("unknown recipe 'xxx") and short.endswith("xxx'. hint: `rollmill list` shows them.")
    assert len(short) == MAX_MESSAGE + len(" [...] ")
