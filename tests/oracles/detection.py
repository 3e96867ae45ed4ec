"""Scores of object detection, written from COCO's and ROLL's definitions for float64 arrays."""

from __future__ import annotations

import itertools

import numpy as np


def overlap(a, b):
    """Intersection over union of two boxes (x1, y1, x2, y2), by counting unit squares."""
    cells = [set(itertools.product(range(x1, x2), range(y1, y2))) for x1, y1, x2, y2 in (a, b)]
    return len(cells[0] & cells[1]) / len(cells[0] | cells[1])


def average_precision(boxes, gold, threshold):
    """COCO's: the mean over labels of the precision at 101 recalls, made monotone from the right."""
    values = []
    for label in {name for name, _ in gold}:
        targets = [box for name, box in gold if name == label]
        taken = np.zeros(len(targets), bool)
        hits = []
        for box in [box for name, box in boxes if name == label]:
            overlaps = np.array([overlap(box, target) for target in targets])
            overlaps[taken] = -1
            best = len(targets) - 1 - int(np.argmax(overlaps[::-1]))
            hits.append(overlaps[best] >= threshold)
            taken[best] |= hits[-1]
        true = np.cumsum(hits)
        recall, precision = true / len(targets), true / np.arange(1, len(hits) + 1)
        precision = np.maximum.accumulate(precision[::-1])[::-1]
        places = np.searchsorted(recall, np.arange(101) / 100, side="left")
        values.append(np.append(precision, 0.0)[places].mean())
    return float(np.mean(values))


def overlap_score(pairs, n_boxes, n_gold, completeness):
    """ROLL's score of matched pairs, whose overlaps are given."""
    missed, false = 1 - len(pairs) / n_gold, 1 - len(pairs) / n_boxes
    return (1 - completeness) * sum(pairs) / n_gold + completeness * (1 - (missed + false) / 2)


def largest_pairs(boxes, gold, threshold):
    """Pairs of the largest overlap first; a pair with two labels counts 0."""
    matrix = np.array([[overlap(box, target) for _, target in gold] for _, box in boxes])
    pairs = []
    while matrix.max() >= threshold:
        i, j = np.unravel_index(np.argmax(matrix), matrix.shape)
        pairs.append(float(matrix[i, j]) if boxes[i][0] == gold[j][0] else 0.0)
        matrix[i, :] = matrix[:, j] = -1
    return pairs


def label_pairs(boxes, gold, threshold):
    """For each box of the task, the free box of its label with the largest overlap."""
    taken, pairs = set(), []
    for label, target in gold:
        overlaps = {
            i: overlap(box, target)
            for i, (name, box) in enumerate(boxes)
            if name == label and i not in taken
        }
        best = max(overlaps, key=lambda i: (overlaps[i], -i), default=None)
        if best is not None and overlaps[best] >= threshold:
            taken.add(best)
            pairs.append(overlaps[best])
    return pairs
