"""How the steps of `moonep_megatron.kernels.trees` are rated, and read from their ratings.

A rating is two words of at most 31 bits, compared one after the other, which also say which step it
is: from the top *grade* (3 bits), *preference* (31), kind (2), place (7), second place (7) and
experts (11: those that the giver parts with, or whether a passing rank adds to the flow).
"""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32, cute
from moonep_megatron.kernels import warp

KEYS = 4
_LARGEST, _ABSORBING, _THRIFTY, _SMALLEST = range(KEYS)
PASS, FILL, RELAY = range(3)

Rating = tuple[Int32, Int32]


class Key(NamedTuple):
    """How this warp rates: each field is 0 or 1, but the last two."""

    by_gives: Int32
    by_experts: Int32
    base: Int32
    """The preference of a size is base + sign * size."""
    sign: Int32


def least_of(ratings: list[Rating]) -> Rating:
    """The least, two by two."""
    if len(ratings) == 1:
        return ratings[0]
    half = len(ratings) // 2
    return better(least_of(ratings[:half]), least_of(ratings[half:]), Int32(1))


def ones(bits: int) -> int:
    """A signed word with the lowest bits set, at most 32."""
    return -1 if bits >= 32 else (1 << bits) - 1


@cute.jit
def key_of(number: Int32) -> Key:
    """The key of a number below KEYS."""
    base, sign = Int32(warp.MOST), Int32(-1)
    if number == _SMALLEST:
        base, sign = Int32(0), Int32(1)
    return Key(Int32(number != _LARGEST), Int32(number == _THRIFTY), base, sign)


@cute.jit
def rate(
    grade: Int32,
    size: Int32,
    key: Key,
    kind: Int32,
    place: Int32,
    second: Int32,
    experts: Int32,
) -> Rating:
    """Of a step; the least is best."""
    preference = key.base + key.sign * size
    high = grade << 28 | preference >> 3
    low = (preference & 7) << 27 | kind << 25 | place << 18 | second << 11 | experts
    return high, low


@cute.jit
def step_of(high: Int32, low: Int32, key: Key) -> tuple[Int32, Int32, Int32, Int32, Int32]:
    """Kind, place, second place, experts and size of a rated step."""
    preference = (high & ones(28)) << 3 | low >> 27
    size = (preference - key.base) * key.sign
    return low >> 25 & 3, low >> 18 & 127, low >> 11 & 127, low & 2047, size


@cute.jit
def better(best: Rating, rating: Rating, allowed: Int32) -> Rating:
    """The lesser rating, if the second is allowed."""
    less = Int32(rating[0] < best[0]) | (Int32(rating[0] == best[0]) & Int32(rating[1] < best[1]))
    high, low = best
    if less & allowed != 0:
        high, low = rating
    return high, low
