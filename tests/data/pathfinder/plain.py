"""The generator written again as its specification reads: whole images, floats, no shortcuts."""

import math

import numpy as np

from data.pathfinder.parameters import Pathfinder
from data.pathfinder.templates import N_SEEDS, banks_of, disk_offsets

_PAD = 20


class NoRoomError(Exception):
    """A contour cannot start or continue."""


class PlainGenerator:
    """Grows contours on a (size, size) float mask; a snake is a dict that changes as it grows."""

    def __init__(self, parameters: Pathfinder, margin: int, rng: np.random.Generator) -> None:
        self.parameters, self.margin, self.rng = parameters, margin, rng
        self.size, self.length = parameters.size, parameters.scale.stroke_length
        banks = banks_of(parameters)
        self.first_template = 0
        for bank in banks:
            if bank.margin == margin:
                self.bank = bank
                break
            self.first_template += len(bank.angles)
        self.ring = {tuple(o): N_SEEDS + i for i, o in enumerate(self.bank.ring.tolist())}

    def empty(self):
        mask = np.ones((self.size, self.size))
        border = self.parameters.scale.border
        mask[border:-border, border:-border] = 0
        return mask

    def patch(self, template, y, x):
        """A stroke's mask on an empty image."""
        mask = self.bank.masks[template] / 255.0
        side = len(mask)
        canvas = np.zeros((self.size + side - 1, self.size + side - 1))
        canvas[y : y + side, x : x + side] = mask
        return canvas[side // 2 : side // 2 + self.size, side // 2 : side // 2 + self.size]

    def targets(self):
        """The mask after one attempt at both contours."""
        mask = self.empty()
        first = self._begin(mask, 2 * self.parameters.scale.seed_distance)
        second = self._begin_second(*first["at"])
        for _ in range(self.parameters.contour_length - 1):
            mask = self._extend(mask, first)
            mask = self._extend(mask, second)
        return np.maximum(mask, second["last"])

    def distractors(self, mask):
        """How many distractors find room."""
        n = 0
        for _ in range(self.parameters.n_distractors):
            for _ in range(5):
                try:
                    snake, grown = self._begin(mask, 1), mask
                    for _ in range(self.parameters.distractor_length - 1):
                        grown = self._extend(grown, snake)
                except NoRoomError:
                    continue
                mask = np.maximum(grown, snake["last"])
                n += 1
                break
        return n

    def _begin(self, mask, border):
        mask = mask.copy()
        mask[:border] = mask[-border:] = mask[:, :border] = mask[:, -border:] = 1
        if (mask <= 0.3).mean() < 0.01:
            raise NoRoomError
        for _ in range(3):
            angle = int(self.rng.integers(N_SEEDS))
            taken = self._dilate(mask, self.bank.solid[angle])
            free = np.argwhere(taken <= 0.3)
            if np.isinf(taken).any() or not len(free):
                raise NoRoomError
            y, x = free[self.rng.integers(len(free))].tolist()
            if (snake := self._snake(angle, y, x)) is not None:
                return snake
        raise NoRoomError

    def _begin_second(self, y, x):
        for _ in range(3):
            angle, bearing = self.rng.integers(N_SEEDS, size=2).tolist()
            direction = math.radians(bearing - 180)
            distance = self.parameters.scale.seed_distance
            at = np.rint([y + distance * math.sin(direction), x + distance * math.cos(direction)])
            if (snake := self._snake(angle, int(at[0]), int(at[1]))) is not None:
                return snake
        raise NoRoomError

    def _snake(self, template, y, x):
        angle = math.radians(template - 180)
        head = _move((y, x), angle, self.length)
        pivot = _move(head, angle + math.pi, self.length + self.margin)
        if not (self._inside(head) and self._inside(pivot)):
            return None
        return {"at": (y, x), "pivot": pivot, "angle": angle, "last": self.patch(template, y, x)}

    def _extend(self, mask, snake):
        centre = _move(snake["pivot"], snake["angle"], self.length + 2 * self.margin)
        taken = self._dilate(mask, disk_offsets(self.margin))
        radius = self.length + self.margin
        pixels = {
            (int(centre[0] + radius * math.sin(angle)), int(centre[1] + radius * math.cos(angle)))
            for angle in np.arange(0, 2 * math.pi, 1 / radius).tolist()
        }
        pixels = sorted(filter(self._inside, pixels))
        angles = [math.atan2(y - centre[0], x - centre[1]) for y, x in pixels]
        turns = [
            abs((angle - snake["angle"] + math.pi) % (2 * math.pi) - math.pi) for angle in angles
        ]
        bent = np.minimum(self.parameters.scale.continuity * np.array(turns), math.pi / 2)
        weights = np.cos(bent) ** 2 * (1 - np.array([taken[pixel] for pixel in pixels]))
        if weights.sum() < 1e-4:
            raise NoRoomError
        for _ in range(3):
            i = int(self.rng.choice(len(pixels), p=weights / weights.sum()))
            y, x = pixels[i]
            patch = self.patch(self.ring[y - centre[0], x - centre[1]], y, x)
            if (mask + patch).max() < 1.8:
                mask = np.maximum(mask, snake["last"])
                snake.update(pivot=centre, angle=angles[i], last=patch)
                return mask
        raise NoRoomError

    def _dilate(self, mask, offsets):
        """The largest value at any of the offsets, -inf where all are outside the image."""
        canvas = np.pad(mask, _PAD, constant_values=-np.inf)
        taken = np.full(mask.shape, -np.inf)
        for y, x in (offsets + _PAD).tolist():
            taken = np.maximum(taken, canvas[y : y + self.size, x : x + self.size])
        return taken

    def _inside(self, pixel):
        return min(pixel) >= 0 and max(pixel) < self.size


def _move(pixel, angle, distance):
    return (
        math.ceil(pixel[0] + distance * math.sin(angle)),
        math.ceil(pixel[1] + distance * math.cos(angle)),
    )
