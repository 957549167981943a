"""What experiments are made of, one module for each thing.

``cells``: cells, rows and what is read off them; ``claims``: readings, claims, verdicts, tables;
``store``: rows on disk; ``experiment``: an experiment and what its store says; ``sweeps``: the
runner; ``training``: data, networks and the training run of experiments on images.
"""
