"""The NGD paper: natural gradient against SGD, by learning coefficient, trace and WBIC."""
