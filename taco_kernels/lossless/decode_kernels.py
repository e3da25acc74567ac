"""Triton kernels that decode lossless payloads, and sum them in order."""

import triton
import triton.language as tl

from taco_kernels.common.packing import four_joined
from taco_kernels.lossless.kernels import pairs_decoded
from taco_kernels.lossless.words import FIRST, GROUP, SECOND, words_joined


@triton.jit
def bits_of(w, low, FP32: tl.constexpr):
    """int32 bits as fp32 of the two values of a word, and, of fp32, of their lower halves."""
    if FP32:
        first, second = (w << 16) | (low & FIRST), (w & SECOND) | ((low >> 16) & FIRST)
    else:
        first, second = w << 16, w & SECOND
    return first, second


@triton.jit
def eight_joined(pairs, FP32: tl.constexpr, G: tl.constexpr):
    """int32[8 G]: fp32 bits of what pairs_decoded gives, in order."""
    a0, b0 = bits_of(pairs[0], pairs[4], FP32)
    a1, b1 = bits_of(pairs[1], pairs[5], FP32)
    a2, b2 = bits_of(pairs[2], pairs[6], FP32)
    a3, b3 = bits_of(pairs[3], pairs[7], FP32)
    return tl.reshape(tl.join(four_joined(a0, a1, a2, a3), four_joined(b0, b1, b2, b3)), [8 * G])


@triton.jit
def decode_kernel(
    payload, out, numel, groups, blocks, words,
    payload_stride, out_stride, starts_at, bases_at, codes_at, more_at, high_at, low_at,
    FP32: tl.constexpr, RAW: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Bits of payload[row, tile] to out (int16 or int32), grid (tiles, rows)."""
    G: tl.constexpr = TILE // GROUP
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pairs = pairs_decoded(
        payload + row * payload_stride, tile, numel, groups, blocks, words,
        starts_at, bases_at, codes_at, more_at, high_at, low_at, FP32, RAW, WHOLE, TILE,
    )  # fmt: skip
    first = tile.to(tl.int64) * TILE
    target = out + row * out_stride + first
    at = tl.arange(0, TILE)
    if WHOLE and not FP32:
        words_of = words_joined(pairs[0], pairs[1], pairs[2], pairs[3], G)
        tl.store(target.to(tl.pointer_type(tl.int32)) + tl.arange(0, TILE // 2), words_of)
    else:
        bits = eight_joined(pairs, FP32, G)
        if not FP32:
            bits = bits >> 16
        tl.store(target + at, bits.to(out.dtype.element_ty), mask=at < numel - first)


@triton.jit
def decode_sum_kernel(
    payload, out, numel, groups, blocks, words,
    sender_stride, payload_stride, out_stride, starts_at, bases_at, codes_at, more_at, high_at, low_at,
    senders, scale,
    FP32: tl.constexpr, RAW: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """scale times the sum over payload[sender, row, tile] to out, in order, grid (tiles, rows)."""
    G: tl.constexpr = TILE // GROUP
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    payload += row * payload_stride
    pairs = pairs_decoded(
        payload, tile, numel, groups, blocks, words,
        starts_at, bases_at, codes_at, more_at, high_at, low_at, FP32, RAW, WHOLE, TILE,
    )  # fmt: skip
    total = eight_joined(pairs, FP32, G).to(tl.float32, bitcast=True)
    for _ in tl.range(1, senders):
        payload += sender_stride
        pairs = pairs_decoded(
            payload, tile, numel, groups, blocks, words,
            starts_at, bases_at, codes_at, more_at, high_at, low_at, FP32, RAW, WHOLE, TILE,
        )  # fmt: skip
        total += eight_joined(pairs, FP32, G).to(tl.float32, bitcast=True)
    first = tile.to(tl.int64) * TILE
    at = tl.arange(0, TILE)
    target = out + row * out_stride + first
    tl.store(target + at, (total * scale).to(out.dtype.element_ty), mask=at < numel - first)
