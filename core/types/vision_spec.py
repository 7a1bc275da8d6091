"""Facts about a model that sees images: which tokens stand for one, and what is special about them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TileTexts:
    """What the processor of a checkpoint writes around the tiles of an image, and around a small view of the whole."""

    tile: str
    """Before each tile, with {row} and {column}, counted from 1."""
    row: str
    """Behind each row of tiles."""
    whole: str
    """Before the view of the whole, behind the tiles."""
    alone: str
    """Before the view of the whole of an image that is not cut."""
    end: str
    """Behind everything."""

    def run(self, piece: str, rows: int, columns: int) -> str:
        """What stands for an image of `rows` by `columns` tiles, each of which is `piece`; 0 by 0 is not cut."""
        if not rows:
            return self.alone + piece + self.end
        cut = (
            "".join(self.tile.format(row=row, column=column) + piece for column in range(1, columns + 1)) + self.row
            for row in range(1, rows + 1)
        )
        return "".join(cut) + self.whole + piece + self.end


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """Measures of the vision side of a model."""

    image_token: int
    """Id of the token that stands for a piece of an image, in a run for each image."""
    begin_token: int
    """Id of what a chat template writes for an image; it may be the same token."""
    first_token: int | None = None
    """What stands before a run, if the template does not write it itself."""
    end_token: int | None = None
    """What stands behind a run, if the template does not write it itself."""
    around: tuple[str, str] = ("", "")
    """Text before and behind those tokens, as the processor of the checkpoint writes it."""
    length: int | None = None
    """Tokens of every image; None where they depend on its size."""
    tile: int | None = None
    """Tokens of each of several tiles that an image is cut into."""
    tiles: TileTexts | None = None
    """Text around those tiles; None where they are one run."""
    merge: int = 1
    """Patches in a row, and rows of them, that become one token."""
    rows: tuple[str, str] | None = None
    """Text behind each row of an image's tokens, and behind the last one, where rows are apart."""
    side: int | None = None
    """Pixels of a token's side, where the processor is to be told."""
    most_patches: int | None = None
    """Patches of an image's longer side, at most; None where the tower knows any place."""
    both_ways: bool = False
    """Whether the tokens of an image see each other in both directions."""
    in_windows: bool = False
    """Whether they do that in layers with windows alone."""
    filler: int | None = None
    """What every token that stands for a piece of something is read as, before features take its place."""
    filled: tuple[int, ...] = ()
    """Those tokens, if there is a `filler`."""
    deep: int = 0
    """Layers behind which the vision tower adds to the states of an image's tokens."""
    places: bool = False
    """Whether positions are three: in time, height and width."""
