"""Triton kernel of laplacian3d and its adjoint: a tile of (Y, Z) marches along X, its planes in registers."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels.launching import launch
from fusedops.operators.laplacian3d import empty_output, margin

NUM_WARPS = 2  # of a tile of two rows, as read on an H200: larger tiles leave memory idle, taller ones too
THREADS = 32 * NUM_WARPS
VECTOR = 4  # neighbours along Z that a thread takes at once
PROGRAMS = 16384  # a march is cut until there are as many, some 15 a multiprocessor at once
LONGEST_MARCH = 8

# What is read outside of the grid.
ZERO, WRAPPED, MIRRORED, MIRRORED_ADJOINT = (tl.constexpr(i) for i in range(4))


@triton.jit
def source(node, nodes, OUTSIDE: tl.constexpr):
    """The node whose value is read for `node`, and whether there is one; anything for nodes further out."""
    if OUTSIDE == WRAPPED:
        return (node + 2 * nodes) % nodes, node == node
    elif OUTSIDE == MIRRORED:
        node = tl.where(node < 0, -node, node)
        node = tl.where(node >= nodes, 2 * nodes - 2 - node, node)
        return tl.maximum(node, 0), node == node
    else:
        return node, (node >= 0) & (node < nodes)


@triton.jit
def load(base, rows, rows_exist, columns, columns_exist):
    """A tile at base in the dtype of the arithmetic, zero where there is no value."""
    mask = rows_exist[:, None] & columns_exist[None, :]
    value = tl.load(base + (rows[:, None] + columns[None, :]), mask=mask, other=0.0)
    if value.dtype != tl.float64:
        value = value.to(tl.float32)
    return value


@triton.jit
def weight(node, nodes, OUTSIDE: tl.constexpr):
    """How often a neighbour counts: the mirror's adjoint takes those on the boundary twice."""
    if OUTSIDE == MIRRORED_ADJOINT:
        return tl.where((node == 0) | (node == nodes - 1), 2.0, 1.0)
    else:
        return 1.0


@triton.jit
def second_difference(before, centre, after):
    # Differences first: between neighbours of a smooth function they are exact.
    return (before - centre) + (after - centre)


@triton.jit
def plane(pointer, x, nx, x_stride, OUTSIDE: tl.constexpr):
    """Where the plane x starts, and whether there is one."""
    x, exists = source(x, nx, OUTSIDE)
    return pointer + x.to(tl.int64) * x_stride, exists


@triton.jit
def load_plane(pointer, x, nx, x_stride, rows, rows_exist, columns, columns_exist, OUTSIDE: tl.constexpr):
    """The tile of the plane x."""
    base, exists = plane(pointer, x, nx, x_stride, OUTSIDE)
    return load(base, rows, rows_exist & exists, columns, columns_exist)


@triton.jit
def load_rows(base, exists, y, ny, y_stride, columns, columns_exist, OUTSIDE: tl.constexpr):
    """The values at the rows y of a plane, those outside of the grid included, as often as they count."""
    rows, rows_exist = source(y, ny, OUTSIDE)
    value = load(base, rows * y_stride, rows_exist & exists, columns, columns_exist)
    if OUTSIDE == MIRRORED_ADJOINT:
        value = value * weight(y, ny, OUTSIDE)[:, None]
    return value


@triton.jit
def across_y(
    base, exists, y, ny, y_stride, columns, columns_exist, centre, DISTANCE: tl.constexpr, OUTSIDE: tl.constexpr
):
    """The second difference along Y over DISTANCE nodes."""
    before = load_rows(base, exists, y - DISTANCE, ny, y_stride, columns, columns_exist, OUTSIDE)
    after = load_rows(base, exists, y + DISTANCE, ny, y_stride, columns, columns_exist, OUTSIDE)
    return second_difference(before, centre, after)


@triton.jit
def load_columns(base, rows, rows_exist, z, nz, z_stride, OUTSIDE: tl.constexpr):
    """The values at the columns z of each row, those outside of the grid included, as often as they count."""
    columns, columns_exist = source(z, nz, OUTSIDE)
    value = load(base, rows, rows_exist, columns * z_stride, columns_exist)
    if OUTSIDE == MIRRORED_ADJOINT:
        value = value * weight(z, nz, OUTSIDE)[None, :]
    return value


@triton.jit
def interleave(a, b, c, d):
    """[Y, G] four times -> [Y, 4 G]: a0 b0 c0 d0 a1 ... Each thread has its own four, so nothing moves."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], 4 * a.shape[1]))


@triton.jit
def across_z(
    base,
    rows,
    rows_exist,
    z_start,
    nz,
    z_stride,
    centre,
    DISTANCE: tl.constexpr,
    OUTSIDE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """The second difference along Z over DISTANCE nodes of a tile that starts at z_start.

    A tile that is shifted by one node is not aligned, and its loads would be of single values. Where a thread has four
    neighbours of `centre`, only the nodes at their ends are loaded.
    """
    z = z_start + VECTOR * tl.arange(0, centre.shape[1] // VECTOR)
    if VECTOR == 1:
        before = load_columns(base, rows, rows_exist, z - DISTANCE, nz, z_stride, OUTSIDE)
        after = load_columns(base, rows, rows_exist, z + DISTANCE, nz, z_stride, OUTSIDE)
    else:
        weighted = centre
        if OUTSIDE == MIRRORED_ADJOINT:
            weighted = centre * weight(z_start + tl.arange(0, centre.shape[1]), nz, OUTSIDE)[None, :]
        even, odd = tl.split(tl.reshape(weighted, (centre.shape[0], centre.shape[1] // 4, 2, 2)))
        c0, c2 = tl.split(even)
        c1, c3 = tl.split(odd)
        left = load_columns(base, rows, rows_exist, z - 1, nz, z_stride, OUTSIDE)
        right = load_columns(base, rows, rows_exist, z + 4, nz, z_stride, OUTSIDE)
        if DISTANCE == 1:
            before = interleave(left, c0, c1, c2)
            after = interleave(c1, c2, c3, right)
        else:
            before = interleave(load_columns(base, rows, rows_exist, z - 2, nz, z_stride, OUTSIDE), left, c0, c1)
            after = interleave(c2, c3, right, load_columns(base, rows, rows_exist, z + 5, nz, z_stride, OUTSIDE))
    return second_difference(before, centre, after)


@triton.jit
def laplacian3d_kernel(
    u_pointer,
    out_pointer,
    batch_stride,
    x_stride,
    y_stride,
    z_stride,
    nx,
    ny,
    nz,
    march,
    x_factor: tl.float64,
    y_factor: tl.float64,
    z_factor: tl.float64,
    BLOCK_Y: tl.constexpr,
    BLOCK_Z: tl.constexpr,
    ORDER: tl.constexpr,
    OUTSIDE: tl.constexpr,
    SHIFT: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One program a tile of `march` planes. u has (nx, ny, nz) nodes, result i belongs to node i + SHIFT.

    The factors are 1 / spacing^2, for order 4 a twelfth of it. WIDE: offsets within a plane need 64 bits.
    """
    out_x = nx - 2 * SHIFT
    out_y = ny - 2 * SHIFT
    out_z = nz - 2 * SHIFT
    z_tiles = tl.cdiv(out_z, BLOCK_Z)
    y_tiles = tl.cdiv(out_y, BLOCK_Y)
    marches = tl.cdiv(out_x, march)
    program = tl.program_id(0)
    z_start = program % z_tiles * BLOCK_Z
    y_start = program // z_tiles % y_tiles * BLOCK_Y
    x_start = program // (z_tiles * y_tiles) % marches * march
    batch = (program // (z_tiles * y_tiles * marches)).to(tl.int64)

    u_pointer += batch * batch_stride
    if WIDE:
        y_start = y_start.to(tl.int64)
        z_start = z_start.to(tl.int64)
    y = y_start + tl.arange(0, BLOCK_Y)
    z = z_start + tl.arange(0, BLOCK_Z)
    out_exist = (y < out_y)[:, None] & (z < out_z)[None, :]
    out_offsets = y[:, None] * out_z + z[None, :]
    out_plane = tl.full((), 1, tl.int64) * out_y * out_z
    y += SHIFT
    z += SHIFT
    z_start += SHIFT
    columns_exist = (z >= 0) & (z < nz)
    columns = z * z_stride
    rows, rows_exist = source(y, ny, OUTSIDE)
    rows *= y_stride

    computing: tl.constexpr = tl.float64 if u_pointer.dtype.element_ty == tl.float64 else tl.float32
    x_factor = tl.full((), x_factor, computing)
    y_factor = tl.full((), y_factor, computing)
    z_factor = tl.full((), z_factor, computing)

    x = x_start + SHIFT
    before = load_plane(u_pointer, x - 1, nx, x_stride, rows, rows_exist, columns, columns_exist, OUTSIDE)
    centre = load_plane(u_pointer, x, nx, x_stride, rows, rows_exist, columns, columns_exist, OUTSIDE)
    if ORDER == 4:
        before2 = load_plane(u_pointer, x - 2, nx, x_stride, rows, rows_exist, columns, columns_exist, OUTSIDE)
        after = load_plane(u_pointer, x + 1, nx, x_stride, rows, rows_exist, columns, columns_exist, OUTSIDE)
    out_pointer += (batch * out_x + x_start) * out_plane
    for step in range(0, tl.minimum(march, out_x - x_start)):
        x = x_start + SHIFT + step
        ahead = load_plane(u_pointer, x + ORDER // 2, nx, x_stride, rows, rows_exist, columns, columns_exist, OUTSIDE)
        base, exists = plane(u_pointer, x, nx, x_stride, OUTSIDE)
        here = rows_exist
        if SHIFT < 0:  # otherwise the plane of a result exists; a mask that differs by plane takes registers
            here = here & exists
        if ORDER == 2:
            after = ahead
        along_x = second_difference(weight(x - 1, nx, OUTSIDE) * before, centre, weight(x + 1, nx, OUTSIDE) * after)
        along_y = across_y(base, exists, y, ny, y_stride, columns, columns_exist, centre, 1, OUTSIDE)
        along_z = across_z(base, rows, here, z_start, nz, z_stride, centre, 1, OUTSIDE, VECTOR)
        if ORDER == 4:
            along_x = 16 * along_x - second_difference(before2, centre, ahead)
            along_y = 16 * along_y - across_y(base, exists, y, ny, y_stride, columns, columns_exist, centre, 2, OUTSIDE)
            along_z = 16 * along_z - across_z(base, rows, here, z_start, nz, z_stride, centre, 2, OUTSIDE, VECTOR)
            before2 = before
        laplacian = x_factor * along_x + y_factor * along_y + z_factor * along_z
        tl.store(out_pointer + out_offsets, laplacian, mask=out_exist)
        out_pointer += out_plane
        before = centre
        centre = after
        if ORDER == 4:
            after = ahead


def _tile(columns: int, vector: int) -> tuple[int, int]:
    """(BLOCK_Y, BLOCK_Z): of so many values that a thread has exactly `vector`, which are neighbours along Z.

    With more of them Triton would give each thread neighbours even where they cannot be loaded at once.
    """
    block_z = min(max(triton.next_power_of_2(columns), 16), 32 * vector)
    return THREADS * vector // block_z, block_z


def _vector(u: Tensor, out: Tensor) -> int:
    """VECTOR where Triton can know that rows are aligned, which it asks of multiples of 16; otherwise 1."""
    aligned = u.stride(-1) == 1 and all(n % 16 == 0 for n in (*u.stride()[:-1], u.shape[-1], out.shape[-1]))
    return VECTOR if aligned and u.itemsize <= 4 and u.data_ptr() % 16 == 0 else 1


def _launch(u: Tensor, spacing: Sequence[float], boundary: str, order: int, *, adjoint: bool) -> Tensor:
    out = empty_output(u, boundary, order, adjoint=adjoint)
    if not out.numel():
        return out
    u = u.flatten(0, -4) if u.dim() > 3 else u.unsqueeze(0)  # a view, unless no stride reaches all the batch
    shift = margin(boundary, order) * (-1 if adjoint else 1)
    outside = {"periodic": WRAPPED, "neumann": MIRRORED_ADJOINT if adjoint else MIRRORED}.get(boundary, ZERO)
    vector = _vector(u, out)
    block_y, block_z = _tile(out.shape[-1], vector)
    out_x, out_y, out_z = out.shape[-3:]
    columns = len(u) * triton.cdiv(out_y, block_y) * triton.cdiv(out_z, block_z)
    march = min(max(columns * out_x // PROGRAMS, 1), LONGEST_MARCH)
    farthest = max((u.shape[2] + 2 * block_y) * u.stride(2) + (u.shape[3] + 2 * block_z) * u.stride(3), out_y * out_z)
    # Of an axis of one node, the mirror's adjoint knows no neighbour.
    factors = (
        0.0 if outside == MIRRORED_ADJOINT and n == 1 else 1 / ((12 if order == 4 else 1) * h**2)
        for n, h in zip(u.shape[1:], spacing, strict=True)
    )
    launch(
        laplacian3d_kernel,
        columns * triton.cdiv(out_x, march),
        (u, out),
        (*u.stride(), *u.shape[1:], march, *factors),
        NUM_WARPS,
        BLOCK_Y=block_y,
        BLOCK_Z=block_z,
        ORDER=order,
        OUTSIDE=outside.value,
        SHIFT=shift,
        VECTOR=vector,
        WIDE=farthest >= 2**31,
    )
    return out


def laplacian3d(u: Tensor, spacing: Sequence[float], boundary: str, order: int) -> Tensor:
    return _launch(u, spacing, boundary, order, adjoint=False)


def laplacian3d_adjoint(v: Tensor, spacing: Sequence[float], boundary: str, order: int) -> Tensor:
    return _launch(v, spacing, boundary, order, adjoint=True)
