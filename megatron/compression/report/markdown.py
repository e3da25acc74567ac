"""Markdown tables."""

from collections.abc import Iterable


def table(*rows: Iterable[str], aligned: bool = False) -> list[str]:
    """Return the lines of a Markdown table.

    Args:
        rows: cells by row; the first row is the header.
        aligned: pad cells so that columns line up in a log.
    """
    cells = [list(row) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    if not aligned:
        header, *body = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in cells]
        return [header, "|---" * len(widths) + "|", *body]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells]
    header, *body = [f"| {' | '.join(row)} |" for row in padded]
    rule = "|".join("-" * (width + 2) for width in widths)
    return [header, f"|{rule}|", *body]
