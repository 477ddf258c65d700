"""Placement of the strokes of Pathfinder images, compiled with Numba.

The algorithm follows drewlinsley/pathfinder (snakes2.py and snakes.py, commit ab9c130). Two
contours grow in turns, one stroke at a time, and both start over if one finds no room. Distractors
grow after them. The tests run in another order than in the reference, with the same distribution.
Strokes are template indices; only the mask of occupied pixels is drawn.

Masks are 8 bits; a canvas is a flat mask with padding, see tables.py.
"""

import math

import numpy as np
from numba import njit

from data.compiled_random import GOLDEN, below, mix64, uniform
from data.pathfinder.tables import PAD
from data.pathfinder.templates import N_SEEDS

_FREE = 76  # the largest mask value on which a contour may start, 0.3 of 255
_FULL = 255
_MIN_TOTAL_WEIGHT = 1e-4
_N_DRAWS = 3
_N_TRIES = 5
_MIN_FREE_PIXELS = 0.01
_EAGER_CHOICES = 8
_EAGER_STARTS = 100


@njit
def _empty_canvas(t):
    """Create a canvas without strokes; its border is occupied."""
    canvas = np.zeros((t.stride, t.stride), np.uint8)
    canvas[PAD : PAD + t.size, PAD : PAD + t.size] = _FULL
    first, end = PAD + t.border, PAD + t.size - t.border
    canvas[first:end, first:end] = 0
    return canvas.reshape(-1)


@njit
def _inside(t, y, x):
    return 0 <= y < t.size and 0 <= x < t.size


@njit
def _start(t, angle, y, x, snakes, s, strokes, n):
    """Start snake s with stroke n at a pixel; returns whether the stroke fits into the image."""
    head_y = math.ceil(y + t.stroke_length * t.sin[angle])
    head_x = math.ceil(x + t.stroke_length * t.cos[angle])
    pivot_y = math.ceil(head_y + (t.stroke_length + t.margin) * t.back_sin[angle])
    pivot_x = math.ceil(head_x + (t.stroke_length + t.margin) * t.back_cos[angle])
    if not (_inside(t, head_y, head_x) and _inside(t, pivot_y, pivot_x)):
        return False
    snakes[s, 0], snakes[s, 1], snakes[s, 2] = pivot_y, pivot_x, angle
    strokes[n, 0], strokes[n, 1], strokes[n, 2] = angle, y, x
    return True


@njit
def _is_open(canvas, t, angle, pixel):
    """Whether a contour may start at a pixel, given by its row-major index."""
    at = (pixel // t.size + PAD) * t.stride + pixel % t.size + PAD
    for k in range(t.n_solid[angle]):  # noqa: SIM110, which Numba could not compile
        if canvas[at + t.solid[angle, k]] > _FREE:
            return False
    return True


@njit
def _open_pixel(canvas, t, rng, angle):
    """Draw a pixel uniformly from all where a contour may start; -1 if there is none."""
    n_pixels = t.size * t.size
    for _ in range(_EAGER_STARTS):
        pixel = below(rng, n_pixels)
        if _is_open(canvas, t, angle, pixel):
            return pixel
    n_open = 0
    for pixel in range(n_pixels):
        n_open += _is_open(canvas, t, angle, pixel)
    if n_open == 0:
        return -1
    remaining = below(rng, n_open)
    for pixel in range(n_pixels):
        if _is_open(canvas, t, angle, pixel):
            if remaining == 0:
                return pixel
            remaining -= 1
    return -1


@njit
def _occupancy(canvas, t, y, x):
    """Largest mask value within the margin of a pixel; 255 outside the image."""
    if not _inside(t, y, x):
        return _FULL
    at = (y + PAD) * t.stride + x + PAD
    largest = 0
    for k in range(t.n_disk):
        largest = max(largest, canvas[at + t.disk[k]])
    return largest


@njit
def _weigh(canvas, t, centre_y, centre_x, direction, weights):
    """Compute the weights of all turns from the room around their pixels; returns the sum."""
    total = 0.0
    for j in range(t.n_turns[direction]):
        i = t.turn[direction, j]
        occupancy = _occupancy(canvas, t, centre_y + t.ring[i, 0], centre_x + t.ring[i, 1])
        weights[j] = t.turn_weight[direction, j] * (_FULL - occupancy) / _FULL
        total += weights[j]
    return total


@njit
def _choose(canvas, t, rng, centre_y, centre_x, direction, weights):
    """Draw a ring pixel by weight; -1 if the sum of all weights is almost 0.

    The weight is the product of a turn factor and a room factor. Rejection sampling draws a turn by
    the first factor and accepts it with the second as probability. It only checks the room around
    the pixels that it draws. After too many rejections, all weights are computed.
    """
    last = t.n_turns[direction] - 1
    for _ in range(_EAGER_CHOICES):
        u = uniform(rng) * t.turn_sum[direction, last]
        j = 0
        while j < last and t.turn_sum[direction, j] <= u:
            j += 1
        i = t.turn[direction, j]
        y, x = centre_y + t.ring[i, 0], centre_x + t.ring[i, 1]
        limit = _FULL - below(rng, _FULL)
        if not _inside(t, y, x):
            continue
        at = (y + PAD) * t.stride + x + PAD
        largest = np.int64(0)
        for k in range(t.n_disk):
            largest = max(largest, np.int64(canvas[at + t.disk[k]]))
            if largest >= limit:
                break
        if largest < limit:
            # One weight above the threshold is enough; otherwise sum all of them.
            if t.turn_weight[direction, j] * (_FULL - largest) >= _MIN_TOTAL_WEIGHT * _FULL:
                return i
            total = _weigh(canvas, t, centre_y, centre_x, direction, weights)
            return i if total >= _MIN_TOTAL_WEIGHT else -1
    total = _weigh(canvas, t, centre_y, centre_x, direction, weights)
    if total < _MIN_TOTAL_WEIGHT:
        return -1
    u = uniform(rng) * total
    chosen = -1
    for j in range(last + 1):
        if weights[j] > 0.0:
            chosen = t.turn[direction, j]
            u -= weights[j]
            if u < 0.0:
                break
    return chosen


@njit
def _extend(canvas, t, rng, snakes, s, weights, strokes, n):
    """Add a stroke to snake s, (pivot y, pivot x, direction); returns whether there is room.

    Writes template, y and x to strokes[n] and advances the snake.
    """
    direction = snakes[s, 2]
    reach = t.stroke_length + 2 * t.margin
    centre_y = math.ceil(snakes[s, 0] + reach * t.sin[direction])
    centre_x = math.ceil(snakes[s, 1] + reach * t.cos[direction])
    for _ in range(_N_DRAWS):
        i = _choose(canvas, t, rng, centre_y, centre_x, direction, weights)
        if i < 0:
            return False
        y, x, template = centre_y + t.ring[i, 0], centre_x + t.ring[i, 1], N_SEEDS + i
        at = (y + PAD) * t.stride + x + PAD
        # The stroke collides if an occupied pixel reaches the limit of its core.
        for k in range(t.n_core[template]):
            if canvas[at + t.core[template, k]] >= t.core_limit[template, k]:
                break
        else:
            snakes[s, 0], snakes[s, 1], snakes[s, 2] = centre_y, centre_x, template
            strokes[n, 0], strokes[n, 1], strokes[n, 2] = template, y, x
            return True
    return False


@njit
def _add_mask(canvas, t, strokes, n):
    """Mark stroke n and its margin as occupied."""
    template, y, x = strokes[n, 0], strokes[n, 1], strokes[n, 2]
    reach = t.reach
    left, right = max(-reach, -x), min(reach, t.size - 1 - x)
    for dy in range(max(-reach, -y), min(reach, t.size - 1 - y) + 1):
        at = (y + dy + PAD) * t.stride + x + PAD
        for dx in range(left, right + 1):
            canvas[at + dx] = max(canvas[at + dx], t.masks[template, reach + dy, reach + dx])


@njit
def _restore(canvas, source, t, strokes, first, end):
    """Restore the canvas under the masks of strokes first to end - 1 from `source`."""
    reach = t.reach
    for n in range(first, end):
        at = (strokes[n, 1] + PAD) * t.stride + strokes[n, 2] + PAD
        for dy in range(-reach, reach + 1):
            left = at + dy * t.stride - reach
            for k in range(left, left + 2 * reach + 1):
                canvas[k] = source[k]


@njit
def _begin_targets(t, rng, snakes, strokes):
    """Place the first strokes of both contours; returns whether there is room."""
    for _ in range(_N_DRAWS):
        angle = below(rng, N_SEEDS)
        region = t.first_region[angle]
        top, bottom, left, right = region[0], region[1], region[2], region[3]
        if not t.startable[angle] or bottom < top or right < left:
            return False
        y, x = top + below(rng, bottom - top + 1), left + below(rng, right - left + 1)
        if _start(t, angle, y, x, snakes, 0, strokes, 0):
            break
    else:
        return False
    for _ in range(_N_DRAWS):
        angle, bearing = below(rng, N_SEEDS), below(rng, N_SEEDS)
        y = np.int64(np.rint(strokes[0, 1] + t.seed_distance * t.sin[bearing]))
        x = np.int64(np.rint(strokes[0, 2] + t.seed_distance * t.cos[bearing]))
        if _start(t, angle, y, x, snakes, 1, strokes, t.contour_length):
            return True
    return False


@njit
def _draw_targets(canvas, empty, t, rng, snakes, strokes, weights):
    """Try once to draw both contours; a failed attempt leaves the canvas empty.

    A stroke is marked as occupied when the next stroke of its contour is placed. Until then,
    contours may cross its margin. The last stroke of the second contour is marked at the end, that
    of the first contour is not.
    """
    if not _begin_targets(t, rng, snakes, strokes):
        return False
    length = t.contour_length
    for i in range(1, length):
        for s in range(2):
            at = s * length + i
            if not _extend(canvas, t, rng, snakes, s, weights, strokes, at):
                # Remove the masks of both contours: the first one is ahead by s strokes.
                _restore(canvas, empty, t, strokes, 0, i - 1 + s)
                _restore(canvas, empty, t, strokes, length, length + i - 1)
                return False
            _add_mask(canvas, t, strokes, at - 1)
    _add_mask(canvas, t, strokes, 2 * length - 1)
    return True


@njit
def _begin_distractor(canvas, t, rng, snakes, strokes, n):
    """Place the first stroke of a distractor; returns whether there is room."""
    for _ in range(_N_DRAWS):
        angle = below(rng, N_SEEDS)
        if not t.startable[angle]:
            return False
        pixel = _open_pixel(canvas, t, rng, angle)
        if pixel < 0:
            return False
        if _start(t, angle, pixel // t.size, pixel % t.size, snakes, 0, strokes, n):
            return True
    return False


@njit
def _draw_distractor(canvas, saved, t, rng, snakes, weights, strokes, first):
    """Try once to draw a distractor; a failed attempt restores the canvas from `saved`."""
    if not _begin_distractor(canvas, t, rng, snakes, strokes, first):
        return False
    end = first + t.distractor_length
    for n in range(first + 1, end):
        if not _extend(canvas, t, rng, snakes, 0, weights, strokes, n):
            _restore(canvas, saved, t, strokes, first, n - 1)
            return False
        _add_mask(canvas, t, strokes, n - 1)
    _add_mask(canvas, t, strokes, end - 1)
    for n in range(first, end):
        _add_mask(saved, t, strokes, n)
    return True


@njit
def _has_free_pixels(canvas, t):
    n_free = 0
    for y in range(PAD, PAD + t.size):
        for x in range(PAD, PAD + t.size):
            n_free += canvas[y * t.stride + x] <= _FREE
    return n_free >= _MIN_FREE_PIXELS * t.size * t.size


@njit
def _draw_image(t, rng, label, strokes, markers):
    """Write strokes and markers of an image; returns the numbers of strokes and restarts."""
    empty = _empty_canvas(t)
    canvas = empty.copy()
    snakes = np.empty((2, 3), np.int64)
    weights = np.empty(t.turn.shape[1], np.float64)
    restarts = 0
    while not _draw_targets(canvas, empty, t, rng, snakes, strokes, weights):
        restarts += 1
    saved = canvas.copy()
    length = t.contour_length
    n_strokes = 2 * length
    for _ in range(t.n_distractors):
        if not _has_free_pixels(canvas, t):
            break
        for _ in range(_N_TRIES):
            if _draw_distractor(canvas, saved, t, rng, snakes, weights, strokes, n_strokes):
                n_strokes += t.distractor_length
                break
    origin = below(rng, 2)
    terminal = origin if label == 1 else 1 - origin
    for axis in range(2):
        markers[0, axis] = strokes[origin * length, 1 + axis]
        markers[1, axis] = strokes[terminal * length + length - 1, 1 + axis]
    return n_strokes, restarts


@njit(nogil=True, cache=True)
def draw_images(tables, key, numbers, strokes, markers, counts):
    """Generate images and write them to arrays.

    Args:
        tables: (n_margins,) of TABLES_DTYPE.
        key: uint64, seed of all images.
        numbers: (n,) uint64; an image depends only on the key and its own number.
        strokes: (n, max_strokes, 3) int64 output: display list template, y, x.
        markers: (n, 2, 2) int64 output.
        counts: (n, 4) int64 output: n_strokes, label, margin, restarts.
    """
    rng = np.empty(2, np.uint64)
    for n in range(len(numbers)):
        rng[0] = mix64(key ^ mix64(numbers[n] + GOLDEN))
        rng[1] = mix64(rng[0] + GOLDEN) | np.uint64(1)
        label = below(rng, 2)
        t = tables[below(rng, len(tables))]
        n_strokes, restarts = _draw_image(t, rng, label, strokes[n], markers[n])
        strokes[n, :n_strokes, 0] += t.first_template
        strokes[n, n_strokes:] = 0
        counts[n, 0], counts[n, 1] = n_strokes, label
        counts[n, 2], counts[n, 3] = t.margin, restarts
