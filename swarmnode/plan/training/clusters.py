"""Clusters of a network at several scales: how slow a link at least has to be crossed to get from one peer to another.

Single linkage turns hops into an ultrametric: two peers are as far apart as the level at which their clusters become one. By it the
least that must cross between two sets of peers is a sum over clusters, without any matching (earth mover's distance on a tree).
"""

from __future__ import annotations

import numpy as np

from swarmnode.plan.offline.layouts import dendrogram
from swarmnode.plan.spans.flow import Floats, Indexes

LEVELS = 6  # scales that are told apart


class Clusters:
    """Of N peers. `rise_L`: seconds that a hop which leaves the clusters of a level costs more than one inside; `label_LN`: the
    cluster of each peer at each level, at the first of which everybody is alone; `order`: all peers, clusters of any level side by
    side."""

    def __init__(self, hop_NN: Floats) -> None:
        peers = len(hop_NN)
        tree = dendrogram(hop_NN)
        self.order = tree.order
        scales = _scales(np.unique(tree.gaps)) if peers > 1 else []
        tops = [-1.0, *(float(scale.max()) for scale in scales[:-1])]
        self.rise_L: Floats = np.diff([0.0, *(float(scale.mean()) for scale in scales)])
        self.label_LN: Indexes = np.zeros((len(scales), peers), np.intp)
        for level, top in enumerate(tops[: len(scales)]):
            for label, members in enumerate(tree.clusters(top)):
                self.label_LN[level, members] = label

    def __repr__(self) -> str:
        counts = [int(labels.max()) + 1 for labels in self.label_LN]
        return f"<Clusters {counts}, hops of {np.cumsum(self.rise_L).round(4).tolist()} s>"

    def members(self) -> tuple[Floats, Floats]:
        """All clusters of all levels: [K, N] who is in each, and [K] the seconds of its level."""
        each = [np.eye(int(labels.max()) + 1)[labels].T for labels in self.label_LN]
        if not each:
            return np.zeros((0, self.label_LN.shape[1])), np.zeros(0)
        return np.concatenate(each), np.repeat(self.rise_L, [len(one) for one in each])

    def sizes(self, chosen: Indexes) -> Floats:
        """[L, C]: how many of the chosen peers are in the cluster of each."""
        labels_LC = self.label_LN[:, chosen]
        sizes_LC: Floats = (labels_LC[:, :, None] == labels_LC[:, None, :]).sum(axis=2).astype(float)
        return sizes_LC


def _scales(heights: Floats) -> list[Floats]:
    """Heights in groups, cut where one is most times the one before."""
    steps = np.diff(np.log(np.maximum(heights, 1e-9)))
    cuts = np.sort(np.argsort(-steps, kind="stable")[: LEVELS - 1])
    return np.split(heights, cuts + 1)
