"""The end of a text by stop strings. An engine and whoever shows the text find the same one."""

from collections.abc import Sequence


def first_stop(text: str, stops: Sequence[str], searched: int = 0) -> tuple[int, str] | None:
    """Returns where the stop string begins that ends first, after the first ``searched`` characters, and which it is.

    Of several that end together it is the longest. However tokens cut the text, the answer is the same. Returns None
    without one.
    """
    found = [(text.find(stop, max(0, searched - len(stop) + 1)), stop) for stop in stops]
    return min(
        (each for each in found if each[0] >= 0), key=lambda each: (each[0] + len(each[1]), each[0]), default=None
    )
