"""Everything that msgspec raises on bytes that are not what they should be.

Not all of it is a DecodeError: text that is not UTF-8 and arrays nested a thousand deep come out as Python's own errors
(msgspec 0.19 to 0.21), and would pass by an `except msgspec.DecodeError` into whoever called.
"""

from __future__ import annotations

import msgspec

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
