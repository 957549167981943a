"""Spectral analysis of graphs: their density, its clusters, its likeness to others, the model
that made it.

Chapter 3 of the spectral thesis, for graphs with millions of edges.
"""

from lambdahat.graphs.cluster_counts import (
    Clusters,
    Gap,
    cluster_labels,
    clusters,
    smoothed_lanczos_clusters,
)
from lambdahat.graphs.random_models import ModelChoice, ModelFit, fit_model, which_model
from lambdahat.graphs.read import graph
from lambdahat.graphs.similarities import Similarity, similarity
from lambdahat.graphs.spectra import EdgePerturbation, GraphSpectrum, edge_perturbation, spectrum
from lambdahat.graphs.structure import Graph

__all__ = [
    "Clusters",
    "EdgePerturbation",
    "Gap",
    "Graph",
    "GraphSpectrum",
    "ModelChoice",
    "ModelFit",
    "Similarity",
    "cluster_labels",
    "clusters",
    "edge_perturbation",
    "fit_model",
    "graph",
    "similarity",
    "smoothed_lanczos_clusters",
    "spectrum",
    "which_model",
]
