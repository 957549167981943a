"""The building blocks of experiments, one module each.

``cells``: cells, rows and what is read off them; ``claims``: readings, claims, verdicts, tables;
``store``: rows on disk; ``experiment``: an experiment and what its store says; ``sweeps``: the
runner; ``training``: data, networks and the training run of experiments on images.

``from lambdahat.experiments import kit`` gives an experiment the names below: ``kit.grid``,
``kit.Claim``, ``kit.curve``.
"""

from lambdahat.experiments.kit.cells import Cell as Cell
from lambdahat.experiments.kit.cells import Row as Row
from lambdahat.experiments.kit.cells import Rows as Rows
from lambdahat.experiments.kit.cells import by_seed as by_seed
from lambdahat.experiments.kit.cells import capitalize as capitalize
from lambdahat.experiments.kit.cells import curve as curve
from lambdahat.experiments.kit.cells import curves as curves
from lambdahat.experiments.kit.cells import decades as decades
from lambdahat.experiments.kit.cells import errors as errors
from lambdahat.experiments.kit.cells import exponent as exponent
from lambdahat.experiments.kit.cells import finite as finite
from lambdahat.experiments.kit.cells import gap as gap
from lambdahat.experiments.kit.cells import gap_of_gaps as gap_of_gaps
from lambdahat.experiments.kit.cells import grid as grid
from lambdahat.experiments.kit.cells import image_setting as image_setting
from lambdahat.experiments.kit.cells import logs as logs
from lambdahat.experiments.kit.cells import means as means
from lambdahat.experiments.kit.cells import means_table as means_table
from lambdahat.experiments.kit.cells import more_seeds as more_seeds
from lambdahat.experiments.kit.cells import over_seeds as over_seeds
from lambdahat.experiments.kit.cells import points as points
from lambdahat.experiments.kit.cells import printed_points as printed_points
from lambdahat.experiments.kit.cells import reading_series as reading_series
from lambdahat.experiments.kit.cells import series_of as series_of
from lambdahat.experiments.kit.cells import setting as setting
from lambdahat.experiments.kit.cells import short as short
from lambdahat.experiments.kit.cells import spectra as spectra
from lambdahat.experiments.kit.cells import stems as stems
from lambdahat.experiments.kit.claims import LEAST_EFFECT as LEAST_EFFECT
from lambdahat.experiments.kit.claims import MISSING as MISSING
from lambdahat.experiments.kit.claims import PRECONDITION as PRECONDITION
from lambdahat.experiments.kit.claims import UNKNOWN as UNKNOWN
from lambdahat.experiments.kit.claims import Claim as Claim
from lambdahat.experiments.kit.claims import Reading as Reading
from lambdahat.experiments.kit.claims import Table as Table
from lambdahat.experiments.kit.claims import correlation as correlation
from lambdahat.experiments.kit.claims import jointly as jointly
from lambdahat.experiments.kit.claims import least as least
from lambdahat.experiments.kit.claims import least_decades as least_decades
from lambdahat.experiments.kit.claims import mean_of as mean_of
from lambdahat.experiments.kit.claims import paired_difference as paired_difference
from lambdahat.experiments.kit.claims import slope as slope
from lambdahat.experiments.kit.claims import table as table
from lambdahat.experiments.kit.experiment import FLATNESS as FLATNESS
from lambdahat.experiments.kit.experiment import NGD as NGD
from lambdahat.experiments.kit.experiment import PRINTED_RATES as PRINTED_RATES
from lambdahat.experiments.kit.experiment import REGULARIZATION as REGULARIZATION
from lambdahat.experiments.kit.experiment import SPECTRAL as SPECTRAL
from lambdahat.experiments.kit.experiment import ClaimTexts as ClaimTexts
from lambdahat.experiments.kit.experiment import Experiment as Experiment
from lambdahat.experiments.kit.experiment import Size as Size
from lambdahat.experiments.kit.experiment import network_title as network_title
from lambdahat.experiments.kit.experiment import saturation_reason as saturation_reason
from lambdahat.experiments.kit.experiment import sentences as sentences
from lambdahat.experiments.kit.experiment import subject as subject
from lambdahat.results.charts import Chart as Chart
from lambdahat.results.charts import Heat as Heat
from lambdahat.results.charts import Series as Series
