# SPDX-FileCopyrightText: 2026 The QKVShare authors
# SPDX-License-Identifier: Apache-2.0
"""The codecs 3 to 8, +4, 5/3, pq4 and pq2 once more, in numpy and from docs/FORMAT.md §3 alone: the program
tests/codec_blocks.cc writes rows and blocks, this recomputes every code and scale. Usage: codec_reference.py
PATH_OF_CODEC_BLOCKS"""
import collections
import subprocess
import sys

try:
    import numpy as np
except ImportError:
    print("codec_reference: needs numpy (Debian: python3-numpy)")
    sys.exit(77)

F = np.float32
SEED = int.from_bytes(b"QKVShare", "little")
NAMES = {7: "3", 8: "4", 9: "5", 10: "6", 11: "7", 12: "8", 13: "+4", 14: "pq4", 15: "5/3", 17: "pq2"}


def splitmix64(seed, count):
    """Vigna's generator."""
    mask, out = (1 << 64) - 1, []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(z ^ (z >> 31))
    return out


def rotation(dim, bands):
    """H D as a matrix, in double precision; with bands, of half-size runs."""
    run = 1
    while (dim // 2 if bands else dim) % (2 * run) == 0:
        run *= 2
    h = np.ones((1, 1))
    while len(h) < run:
        h = np.block([[h, h], [h, -h]])
    numbers = splitmix64(SEED, 4)
    signs = np.array([-1.0 if numbers[c // 64] >> (c % 64) & 1 else 1.0 for c in range(dim)])
    return np.kron(np.eye(dim // run), h / np.sqrt(run)) * signs


def half(x):
    """To the nearest half and back; -0 becomes +0."""
    return x.astype(np.float16).astype(F) + F(0)


def sanitized(x):
    return np.clip(np.where(np.isnan(x), F(0), x), F(-65504), F(65504))


def mid_rise(y, bits, unit=None):
    """w [tokens][dim], scale [tokens], and the relative squared error of every clip factor. bits, unit: [dim], a channel's
    bits and how much its codes count, or a number and nothing; errors are weighed by 1 / unit^2."""
    tokens, dim = y.shape
    bits = np.broadcast_to(bits, dim)
    y = y if unit is None else y / unit.astype(F)
    best_gain, best_w = np.zeros(tokens, F), np.zeros((tokens, dim), int)
    best_scale, errors = np.zeros(tokens, F), []
    for clip in (1, 0.93, 0.86, 0.79, 0.72):
        h = half((F(clip) * np.abs(y) / (2**bits - 1).astype(F)).max(axis=1))
        with np.errstate(divide="ignore", invalid="ignore"):
            u = np.clip(np.floor(y * (F(0.5) / h)[:, None]), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
            c = (2 * u + 1).astype(F)
            products, squares = np.zeros(tokens, F), np.zeros(tokens, F)
            for channel in range(dim):
                products += y[:, channel] * c[:, channel]
                squares += c[:, channel] * c[:, channel]
            scale = half(products / squares)
            gain = scale * (F(2) * products - scale * squares)
        keep = (h > 0) & (gain > best_gain)
        best_gain[keep], best_scale[keep] = gain[keep], scale[keep]
        best_w[keep] = u[keep].astype(int) + 2 ** (bits - 1)
        error = ((y.astype(float) - scale.astype(float)[:, None] * c) ** 2).sum(axis=1)
        errors.append(np.where(h > 0, error, np.inf))
    return best_w, best_scale, np.array(errors)


def product_quantized(y, book):
    """Numbers of centroids [tokens][dim / 2], and scale [tokens], of book [2][n] (§3.7)."""
    tokens, dim = y.shape
    pairs = dim // 2
    a, b = book.astype(F)
    square = a * a + b * b
    energy = np.zeros(tokens, F)
    for channel in range(dim):
        energy += y[:, channel] * y[:, channel]
    r = np.sqrt(energy / F(dim))
    best_gain, best_scale = np.zeros(tokens, F), np.zeros(tokens, F)
    best_k = np.zeros((tokens, pairs), int)
    for factor in (1, 1.1, 0.9, 0.8):
        h = half(F(factor) * r / F(32))
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            u = y * np.where(h > 0, F(1) / h, F(0))[:, None]
            k = (u[:, :pairs, None] * a + u[:, pairs:, None] * b - square / F(2)).argmax(axis=2)
            products, squares = np.zeros(tokens, F), np.zeros(tokens, F)
            for m in range(pairs):
                products += y[:, m] * a[k[:, m]]
                products += y[:, pairs + m] * b[k[:, m]]
                squares += square[k[:, m]]
            scale = half(products / squares)
            gain = scale * (F(2) * products - scale * squares)
        keep = (h > 0) & (gain > best_gain)
        best_gain[keep], best_scale[keep], best_k[keep] = gain[keep], scale[keep], k[keep]
    return best_k, best_scale


def nearest(y):
    """8 bits: signed codes and scale."""
    scale = half(np.abs(y).max(axis=1) / F(127))
    with np.errstate(divide="ignore"):
        inverse = np.where(scale > 0, F(1) / scale, F(0)).astype(F)
    return np.clip(np.rint(y * inverse[:, None]), -127, 127).astype(int), scale


def codes_of(block, codec, is_v, dim):
    """All 32 tokens' codes [32][dim] (pq4, pq2: [32][dim / 2]) and scales [32] of a block, by FORMAT.md's letter."""
    if codec in (14, 17):
        t, m = np.meshgrid(np.arange(32), np.arange(dim // 2), indexing="ij")
        i = dim * (t // 2) + 2 * m + t % 2 if is_v else 64 * (m // 2) + 2 * t + m % 2
        if codec == 14:
            codes, at = block[i].astype(int), 16 * dim
        else:
            codes, at = (block[64 * (i // 128) + i % 64] >> 4 * (i // 64 % 2) & 15).astype(int), 8 * dim
        return codes, block[at : at + 64].view("<f2").astype(F)
    t, c = np.meshgrid(np.arange(32), np.arange(dim), indexing="ij")
    i = 2 * dim * (t // 2) + 2 * c + t % 2 if is_v else 64 * (c // 2) + 2 * t + c % 2
    if codec == 12:
        codes, at = block[i].astype(np.int8).astype(int), 32 * dim
    elif codec == 15:
        low = block[12 * dim + 64 * (i // 512) + i % 64] >> (i // 64 % 8) & 1
        j = i - 16 * dim  # in the second half
        upper5 = block[64 * (i // 128) + i % 64] >> 4 * (i // 64 % 2) & 15
        upper3 = block[8 * dim + 64 * (j // 256) + j % 64] >> 2 * (j // 64 % 4) & 3
        codes, at = (2 * np.where(c < dim // 2, upper5, upper3) + low).astype(int), 16 * dim
    elif codec == 13:
        byte = block[t * dim // 2 + c % (dim // 2)]
        codes, at = np.where(c < dim // 2, byte & 15, byte >> 4).astype(int), 16 * dim
    else:
        bits = codec - 4
        codes, at = np.zeros((32, dim), int), 0
        for plane in {3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}[bits]:
            per_byte = 8 // plane
            byte = block[at + 64 * (i // (64 * per_byte)) + i % 64].astype(int)
            codes = codes << plane | byte >> plane * (i // 64 % per_byte) & (2**plane - 1)
            at += 32 * dim * plane // 8
    return codes, block[at : at + 64].view("<f2").astype(F)


def check(record, turn):
    codec, is_v, dim, tokens, rows, mean, rotated, encoded, block, book, decoded, back = record
    # The frame, in double precision: within some roundings of the longest row.
    def near(found, expected, source):
        length = np.sqrt((source.astype(float) ** 2).sum(axis=1).max()) + np.sqrt((mean.astype(float) ** 2).sum())
        return np.abs(found - expected).max() <= 2e-7 * length

    assert near(rotated, (sanitized(rows).astype(float) - mean) @ turn.T, sanitized(rows)), "rotated rows"
    assert near(back, decoded.astype(float) @ turn + mean, decoded), "rows turned back"

    y = sanitized(encoded)
    codes, scales = codes_of(block, codec, is_v, dim)
    if codec == 12:
        w, scale = nearest(y)
        values = scale[:, None] * w.astype(F)
    elif codec in (14, 17):
        w, scale = product_quantized(y, book)
        values = scale[:, None] * np.concatenate((book[0][w], book[1][w]), axis=1).astype(F) + F(0)
    else:
        bits, unit = np.full(dim, 4 if codec == 13 else codec - 4), np.ones(dim, int)
        if codec == 15:
            bits, unit = np.repeat((5, 3), dim // 2), np.repeat((1, 4), dim // 2)
        w, scale, errors = mid_rise(y, bits, unit)
        values = scale[:, None] * (unit * (2 * w + 1 - 2**bits)).astype(F) + F(0)
        # What was kept is the best clip factor, whichever way errors are summed.
        found = (((y.astype(float) - values) / unit) ** 2).sum(axis=1)
        energy = ((y / unit).astype(float) ** 2).sum(axis=1)
        assert (found <= np.minimum(errors.min(axis=0), energy) + 1e-6 * energy).all(), "not the best clip factor"
    assert (codes[:tokens] == w).all(), "codes"
    assert (scales[:tokens] == scale).all(), "scales"
    assert not codes[tokens:].any() and not scales[tokens:].any(), "absent tokens"
    assert (decoded == values).all(), "decoded values"
    base = F(0)
    if codec == 13:
        base_w, base_scale, _ = mid_rise(sanitized(rotated), 4)
        base = base_scale[:, None] * (2 * base_w - 15).astype(F)
    assert (encoded == rotated - base).all(), "what is left over"


def main(program):
    data = subprocess.run([program], check=True, stdout=subprocess.PIPE).stdout
    at, seen, turns = 0, collections.Counter(), {}

    def take(dtype, *shape):
        nonlocal at
        count = int(np.prod(shape))
        values = np.frombuffer(data, dtype, count, at).reshape(shape)
        at += values.nbytes
        return values

    while at < len(data):
        codec, is_v, dim, tokens, n_bytes, n_centroids = take("<i4", 6)
        rows, mean = take("<f4", tokens, dim), take("<f4", dim)
        rotated, encoded = take("<f4", tokens, dim), take("<f4", tokens, dim)
        block, book = take("u1", n_bytes), take("i1", 2, n_centroids)
        decoded, back = take("<f4", tokens, dim), take("<f4", tokens, dim)
        bands = codec == 15
        if (dim, bands) not in turns:
            turns[dim, bands] = rotation(dim, bands)
        name = f"{'V' if is_v else 'K'} {NAMES[codec]}, head dim {dim}, {tokens} tokens"
        try:
            record = (codec, is_v, dim, tokens, rows, mean, rotated, encoded, block, book, decoded, back)
            check(record, turns[dim, bands])
        except AssertionError as error:
            sys.exit(f"codec_reference: {name}: {error} differ")
        seen[NAMES[codec], dim] += tokens * dim
    for name in NAMES.values():
        for dim in (64, 80, 128):
            assert seen[name, dim] > 0, (name, dim)
    print(f"codec_reference: {sum(seen.values())} codes of {len(NAMES)} codecs are the same")


if __name__ == "__main__":
    main(sys.argv[1])
