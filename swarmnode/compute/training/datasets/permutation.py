"""A shuffle of the numbers below `count` that needs no memory: each number's place is worked out when it is asked for.

A balanced Feistel network over the next even number of bits, walked until the value falls below `count` (cycle walking).
Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002, section 3.
"""

from __future__ import annotations

import hashlib

ROUNDS = 4


class Permutation:
    """Of the numbers 0 to count - 1, fixed by `key`."""

    def __init__(self, count: int, key: bytes) -> None:
        if count < 1:
            raise ValueError("a permutation needs at least one number")
        self.count = count
        self._half = max(1, ((count - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        self._keys = [hashlib.blake2b(key, salt=bytes([number]), digest_size=16).digest() for number in range(ROUNDS)]

    def __repr__(self) -> str:
        return f"<Permutation of {self.count}>"

    def __call__(self, number: int) -> int:
        """Where `number` goes. Raises ValueError out of range."""
        if not 0 <= number < self.count:
            raise ValueError(f"{number} is not below {self.count}")
        while True:  # at most some four rounds: the domain is less than four times as large
            number = self._encipher(number)
            if number < self.count:
                return number

    def _encipher(self, number: int) -> int:
        left, right = number >> self._half, number & self._mask
        for key in self._keys:
            digest = hashlib.blake2b(right.to_bytes(8, "little"), key=key, digest_size=8).digest()
            left, right = right, left ^ int.from_bytes(digest, "little") & self._mask
        return left << self._half | right
