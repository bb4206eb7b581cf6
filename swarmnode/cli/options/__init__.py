"""Options that several commands share: of asking, founding, nodes, metrics, sampling and training."""
