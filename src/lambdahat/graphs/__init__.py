"""What the spectrum of a graph says: its density, its clusters, its likeness to others, the model
that made it.

Chapter 3 of the spectral thesis, for graphs with millions of edges.
"""

from lambdahat.graphs.cluster_counts import Clusters, Gap, clusters
from lambdahat.graphs.divergences import Similarity, similarity
from lambdahat.graphs.labelling import cluster_labels
from lambdahat.graphs.lanczos_baseline import smoothed_lanczos_clusters
from lambdahat.graphs.model_fits import ModelChoice, ModelFit, fit_model, which_model
from lambdahat.graphs.perturbations import EdgePerturbation, edge_perturbation
from lambdahat.graphs.sources import graph
from lambdahat.graphs.spectra import GraphSpectrum, spectrum
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
