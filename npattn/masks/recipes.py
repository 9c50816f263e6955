"""Masks of the sparse-attention literature, put together: longformer, bigbird, local_strided."""

from typing import Any

from npattn.masks._arguments import whole_number
from npattn.masks.base import Mask
from npattn.masks.blocks import BigBird
from npattn.masks.interval import Window
from npattn.masks.pattern import GlobalTokens, Strided


def longformer(radius: int, global_indices: Any) -> Mask:
    """Longformer's mask: a window of ``radius`` keys on either side, and global tokens.

    Parameters
    ----------
    radius : int
        ``|i − j| <= radius`` is visible.
    global_indices : sequence of int
        Tokens that see and are seen by all; may be empty.

    Returns
    -------
    Mask
        ``Window(radius, radius, offset=0) | GlobalTokens(global_indices)``. No row is empty when len_q <=
        len_k.

    References
    ----------
    .. [1] Beltagy, Peters, Cohan, "Longformer: The Long-Document Transformer", 2020, section 3.1.

    Examples
    --------
    >>> print(longformer(1, [0]).picture(6, 6))
    ██████
    ███···
    ████··
    █·███·
    █··███
    █···██
    """
    return Window(radius, radius, offset=0) | GlobalTokens(global_indices)


def bigbird(block_size: int, window_blocks: int, global_blocks: int, random_blocks: int, seed: int) -> Mask:
    """BigBird's mask: blocks near the diagonal, global blocks and random blocks.

    Parameters
    ----------
    block_size : int
        Queries and keys of a block.
    window_blocks : int
        Blocks of the window, its middle included: ``|r − c| <= window_blocks // 2``; 0 is no window.
    global_blocks : int
        The first so many blocks see and are seen by all.
    random_blocks : int
        How many further blocks each row of blocks sees; fewer where there are no more.
    seed : int
        Decides the random ones, together with the number of blocks.

    Returns
    -------
    Mask
        The same blocks for every batch element and head. No row is empty as long as one of the three numbers
        is positive and the lengths are equal.

    Notes
    -----
    Keeps one bool per block, (len_q / block_size) × (len_k / block_size).

    References
    ----------
    .. [1] Zaheer et al., "Big Bird: Transformers for Longer Sequences", NeurIPS 2020, section 2.

    Examples
    --------
    >>> print(bigbird(1, 3, 1, 1, seed=0).picture(8, 8))
    ████████
    ████····
    █████···
    █████···
    █··███·█
    ██··███·
    █··█·███
    █··█··██
    """
    return BigBird(block_size, window_blocks, global_blocks, random_blocks, seed)


def local_strided(window_size: int, stride: int) -> Mask:
    """A neighbourhood and every ``stride``-th token: ``|i − j| <= window_size // 2``, or i or j divisible.

    Parameters
    ----------
    window_size : int
        Width of the neighbourhood.
    stride : int
        Distance of the tokens that see and are seen by all.

    Returns
    -------
    Mask
        ``Window(window_size // 2, window_size // 2, offset=0) | Strided(stride)``. No row is empty.

    References
    ----------
    .. [1] After Child et al., "Generating Long Sequences with Sparse Transformers", 2019.

    Examples
    --------
    >>> print(local_strided(2, 4).picture(8, 8))
    ████████
    ███·█···
    █████···
    █·███···
    ████████
    █···███·
    █···████
    █···█·██
    """
    half = whole_number("local_strided's window_size", window_size, least=0) // 2
    return Window(half, half, offset=0) | Strided(stride)


__all__ = ["bigbird", "local_strided", "longformer"]
