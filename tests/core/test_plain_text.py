"""Text for people."""

from rollmill.core.text import MAX_MESSAGE, shortened


def test_a_message_that_is_too_long_keeps_its_beginning_and_its_end():
    assert shortened("short") == "short"
    long = "unknown recipe '" + "x" * 100_000 + "'. hint: `rollmill list` shows them."
    short = shortened(long)
    assert short.startswith("unknown recipe 'xxx") and short.endswith("xxx'. hint: `rollmill list` shows them.")
    assert len(short) == MAX_MESSAGE + len(" [...] ")
