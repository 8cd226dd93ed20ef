#!/usr/bin/env python3
# SPDX-FileCopyrightText: 2026 The QKVShare authors
# SPDX-License-Identifier: Apache-2.0
"""Draws what `qkvshare eval --json` found: mean KL against bits per value, as SVG on standard output.

Usage: scripts/plot_quality.py RESULT.json [RESULT.json ...] > docs/quality.svg

Codecs with a refinement plane stand at the bits that attention reads. Bars are one standard error.
"""
import json
import math
import sys
from html import escape

WIDTH, HEIGHT = 920, 560
LEFT, RIGHT, TOP, BOTTOM = 80, 30, 50, 60
GROUPS = [  # name, colour, which rows
    ("llama.cpp's caches", "#c0392b", lambda row: row["kv"].startswith(("llama.cpp:", "like:"))),
    ("tokens by importance", "#8e44ad", lambda row: row["kv"].startswith("tokens:")),
    ("calibrated (bal)", "#d68910", lambda row: "bal" in row["kv"].split(":")[0].split("+")),
    ("with a refinement plane", "#1e8449", lambda row: row.get("refined_share", 0) > 0),
    ("plain frame", "#7f8c8d", lambda row: "i8" in row["kv"] or "i4" in row["kv"]),
    ("rotated frame", "#2471a3", lambda row: True),
]


def points(paths):
    for path in paths:
        with open(path, encoding="utf-8") as file:
            result = json.load(file)
        for row in result["results"]:
            bits = row.get("read_bits_per_value") or row.get("bits_per_value")
            if not bits or not row["kl_mean"] or "hop" in row:
                continue
            yield row, bits


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    rows = list(points(sys.argv[1:]))
    if not rows:
        sys.exit("plot_quality: no rows with bits and a KL in these files")
    low_x, high_x = math.floor(min(b for _, b in rows)), math.ceil(max(b for _, b in rows) + 0.3)
    low_y = math.floor(math.log10(min(r["kl_mean"] for r, _ in rows)))
    high_y = math.ceil(math.log10(max(r["kl_mean"] for r, _ in rows)))

    def x_of(bits):
        return LEFT + (bits - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)

    def y_of(kl):
        return TOP + (high_y - math.log10(max(kl, 10.0**low_y))) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">KL(exact ‖ codec), mean over tokens, against bits per value</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 16}" text-anchor="middle">bits per value, everything '
        "included</text>",
    ]
    for bits in range(low_x, high_x + 1):
        x = x_of(bits)
        out.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#e5e7e9"/>')
        out.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{bits}</text>')
    for power in range(low_y, high_y + 1):
        y = y_of(10.0**power)
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e5e7e9"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    seen = []
    for row, bits in sorted(rows, key=lambda item: item[1]):
        name, colour, _ = next(group for group in GROUPS if group[2](row))
        if name not in seen:
            seen.append(name)
        x, y = x_of(bits), y_of(row["kl_mean"])
        high, low = y_of(row["kl_mean"] + row["kl_se"]), y_of(max(row["kl_mean"] - row["kl_se"], 10.0**low_y))
        out.append(f'<line x1="{x:.1f}" y1="{high:.1f}" x2="{x:.1f}" y2="{low:.1f}" stroke="{colour}"/>')
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        out.append(f'<text x="{x + 7:.1f}" y="{y + 4:.1f}" fill="{colour}">{escape(row["kv"])}</text>')
    for i, name in enumerate(seen):
        colour = next(group[1] for group in GROUPS if group[0] == name)
        y = TOP + 14 + 18 * i
        out.append(f'<circle cx="{WIDTH - RIGHT - 170}" cy="{y - 4}" r="4" fill="{colour}"/>')
        out.append(f'<text x="{WIDTH - RIGHT - 160}" y="{y}">{escape(name)}</text>')
    out.append("</svg>")
    print("\n".join(out))


if __name__ == "__main__":
    main()
