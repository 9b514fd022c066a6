"""sLSTM, one token after the other; a task is a head of a row.

Signals are flat (row, time, [gate,] head, entry), R is (head, from, gate, to), states are (row,
head, entry). What a token leaves for the backward pass is in ``trace``: (row, time, head, part,
entry), with the parts i', f', tanh z, sigma(o), sigma(-f), c and n.
"""

# mypy: ignore-errors

import math

import numpy as np

from stateline.ops.numba_common.blocks import add_multiple, dot
from stateline.ops.numba_common.jit import summing_kernel

PARTS = 7


@summing_kernel
def forward(
    gates, weight, h0, c0, n0, m0, y, h1, c1, n1, m1, trace, length, heads, width, start, stop
):  # fmt: skip
    """Tasks ``start`` to ``stop``; an empty ``trace`` is not filled."""
    four, kept = 4 * width, len(trace) > 0
    zero, one = gates.dtype.type(0), gates.dtype.type(1)
    s, h = np.empty((4, width), gates.dtype), np.empty(width, gates.dtype)
    c, n, m = np.empty_like(h), np.empty_like(h), np.empty_like(h)
    flat = s.reshape(-1)
    for task in range(start, stop):
        row, head = task // heads, task % heads
        place, matrix = task * width, head * width * four
        h[:], c[:] = h0[place : place + width], c0[place : place + width]
        n[:], m[:] = n0[place : place + width], m0[place : place + width]
        for t in range(length):
            token = row * length + t
            for g in range(4):
                at = ((token * 4 + g) * heads + head) * width
                s[g] = gates[at : at + width]
            for j in range(width):
                add_multiple(flat, h[j], weight, matrix + j * four)
            out = (token * heads + head) * width
            for e in range(width):
                f = s[1, e]
                tail = math.exp(-abs(f))
                stays = m[e] + min(f, zero) - math.log1p(tail)  # log sigma(f) + m
                scale = max(stays, s[0, e])
                write, keep = math.exp(s[0, e] - scale), math.exp(stays - scale)
                z, o = math.tanh(s[2, e]), one / (one + math.exp(-s[3, e]))
                c[e], n[e], m[e] = keep * c[e] + write * z, keep * n[e] + write, scale
                h[e] = o * c[e] / n[e]
                y[out + e] = h[e]
                if kept:
                    at = out * PARTS + e
                    trace[at], trace[at + width], trace[at + 2 * width] = write, keep, z
                    trace[at + 3 * width] = o
                    trace[at + 4 * width] = (tail if f > zero else one) / (one + tail)
                    trace[at + 5 * width], trace[at + 6 * width] = c[e], n[e]
        h1[place : place + width], c1[place : place + width] = h, c
        n1[place : place + width], m1[place : place + width] = n, m


@summing_kernel
def backward(
    grad, weight, c0, n0, trace, dh0, dc0, dn0, dgates, length, heads, width, start, stop
):  # fmt: skip
    """Gradients of the gates; dh0, dc0 and dn0 go in for the last state, and out for the first."""
    four, one = 4 * width, grad.dtype.type(1)
    s = np.empty((4, width), grad.dtype)
    flat = s.reshape(-1)
    for task in range(start, stop):
        row, head = task // heads, task % heads
        place, matrix = task * width, head * width * four
        dh, dc = dh0[place : place + width], dc0[place : place + width]
        dn = dn0[place : place + width]
        for t in range(length - 1, -1, -1):
            token = row * length + t
            out = (token * heads + head) * width
            earlier = (out - heads * width) * PARTS
            for e in range(width):
                at = out * PARTS + e
                write, keep, z = trace[at], trace[at + width], trace[at + 2 * width]
                o, forgotten = trace[at + 3 * width], trace[at + 4 * width]
                n = trace[at + 6 * width]
                ratio = trace[at + 5 * width] / n
                c_before = trace[earlier + 5 * width + e] if t > 0 else c0[place + e]
                n_before = trace[earlier + 6 * width + e] if t > 0 else n0[place + e]
                total = dh[e] + grad[out + e]
                to_c = dc[e] + total * o / n
                to_n = dn[e] - total * o * ratio / n
                s[0, e] = (to_c * z + to_n) * write
                s[1, e] = (to_c * c_before + to_n * n_before) * keep * forgotten
                s[2, e] = to_c * write * (one - z * z)
                s[3, e] = total * ratio * o * (one - o)
                dc[e], dn[e] = to_c * keep, to_n * keep
            for g in range(4):
                at = ((token * 4 + g) * heads + head) * width
                dgates[at : at + width] = s[g]
            for j in range(width):
                dh[j] = dot(flat, 0, weight, matrix + j * four, four)
