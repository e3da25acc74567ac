"""Compile-time constants of a kernel as one argument."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Self

import triton
import triton.language as tl


@dataclass(frozen=True, repr=False, eq=False)
class Constants:
    """Base of frozen dataclasses of tl.constexpr, passed to kernels as one constant argument."""

    @classmethod
    def of(cls, **values: object) -> Self:
        """Constants with these values."""
        return cls(**{name: tl.constexpr(value) for name, value in values.items()})

    @cached_property
    def _text(self) -> str:
        return ",".join(f"{f.name}={getattr(self, f.name).value}" for f in fields(self))

    @cached_property
    def _hash(self) -> int:
        return hash((type(self).__name__, self._text))

    def __repr__(self) -> str:
        """Part of the compiler's cache key."""
        return self._text

    def __hash__(self) -> int:
        """Kept: a launch hashes its constants, and hashing twenty fields takes longer than the rest of it."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and self._text == other._text)


@triton.jit
def as_tensor(number):
    """The variable of a ``tl.range``, which is an int under the interpreter, as int32."""
    return tl.full((), 0, tl.int32) + number
